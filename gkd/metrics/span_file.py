"""Write run_dir/spans.jsonl: what every process of the run did, on the clock of its host.

One line per step and process: {"step", "process", "host", "spans": [{"name", "start_s", "duration_s", "args"}]}. A span
belongs to the step in which it starts. The driver may learn of it later: then the step has another line of the process.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path

import msgspec

from gkd.errors import CheckpointError
from gkd.metrics.writer import MetricsWriter, read_metrics
from gkd.roles import Computation
from gkd.spans import Phase, ProcessSpans, Span, SpanRecorder, driver, in_lanes, merged
from gkd.types import ScoredChunk

_STEPS_KEPT = 1000  # whose starts are kept, for spans that arrive later


class SpanFile:
    """Collects the spans of all processes and writes them.

    Args:
        writer: of spans.jsonl.
        teacher_host: where the teacher server runs.
        recorder: the driver's recorder; what it holds of an earlier run is dropped.
    """

    def __init__(self, writer: MetricsWriter, teacher_host: str = "", recorder: SpanRecorder = driver) -> None:
        self._writer = writer
        self._teacher_host = teacher_host
        self._own = recorder
        recorder.take()
        self._starts: deque[tuple[float, int]] = deque(maxlen=_STEPS_KEPT)  # on the monotonic clock
        self._found: list[ProcessSpans] = []

    def begin(self, step: int) -> None:
        """Start a step: spans from now on belong to it."""
        self._starts.append((self._own.clock(), step))

    def add(self, processes: Iterable[ProcessSpans | None]) -> None:
        """Add spans on the clocks of their hosts."""
        self._found += [spans for spans in processes if spans is not None]

    def add_scored(self, batch: Sequence[ScoredChunk]) -> None:
        """Add the spans of scored chunks; chunks from a checkpoint or of a local teacher have none."""
        by_endpoint: defaultdict[str, list[Span]] = defaultdict(list)
        for chunk in batch:
            if chunk.times is not None:
                start_s = chunk.times.submitted_s
                end_s = float(chunk.times.completed_s.max())
                args = {"sequences": chunk.rollouts.n_sequences, "tokens": int(chunk.rollouts.n_tokens.sum())}
                span = Span(Phase.SCORE.span, start_s, end_s - start_s, args)
                by_endpoint[f"scoring {chunk.rollouts.dp_rank}"].append(span)
        self._found += [ProcessSpans(name, "", in_lanes(merged(spans))) for name, spans in by_endpoint.items()]

    def add_computations(self, by_endpoint: Mapping[str, Sequence[Computation]]) -> None:
        """Add the batches of the teacher's workers.

        A batch ends when its first reply arrives, or a bit earlier: at the latest when the worker's next one starts.
        Its replies may go to several endpoints.
        """
        first: dict[tuple[str, float], tuple[float, Computation]] = {}
        n_sequences: Counter[tuple[str, float]] = Counter()
        for computation in chain.from_iterable(by_endpoint.values()):
            key = (computation.worker, computation.compute_s)
            end_s = computation.received_s
            n_sequences[key] += computation.n_sequences
            if key not in first or end_s < first[key][0]:
                first[key] = end_s, computation
        by_worker: defaultdict[str, list[Span]] = defaultdict(list)
        for end_s, batch in sorted(first.values(), key=lambda pair: pair[0] - pair[1].compute_s):
            start_s = end_s - batch.compute_s
            spans = by_worker[f"teacher {batch.worker}"]
            if spans and spans[-1].start_s + spans[-1].duration_s > start_s:
                last = spans[-1]
                spans[-1] = Span(last.name, last.start_s, start_s - last.start_s, last.args)
            args = {"queue_s": round(batch.queue_s, 6), "sequences": n_sequences[batch.worker, batch.compute_s]}
            spans.append(Span("compute", start_s, end_s - start_s, args))
        self._found += [ProcessSpans(name, self._teacher_host, merged(spans)) for name, spans in by_worker.items()]

    def end(self) -> None:
        """Write what has been added. Raises CheckpointError: the file cannot be written."""
        to_wall_s = self._own.to_wall_s()
        processes = [self._own.take(to_wall_s), *self._found]
        self._found = []
        hosts = {spans.process: spans.host for spans in processes}
        lines: defaultdict[tuple[int, str], list[Span]] = defaultdict(list)
        for spans in processes:
            for span in spans.spans:
                rounded = Span(span.name, round(span.start_s, 6), round(span.duration_s, 6), span.args)
                lines[self._step_at(span.start_s, to_wall_s), spans.process].append(rounded)
        data = bytearray()
        for (step, process), entries in lines.items():
            line = {"step": step, "process": process, "host": hosts[process], "spans": entries}
            data += msgspec.json.encode(line) + b"\n"
        self._writer.append(bytes(data))

    def _step_at(self, time_s: float, to_wall_s: float) -> int:
        """Return the step that was being made at a time of the wall clock; before the first known one, that one."""
        for start_s, step in reversed(self._starts):
            if start_s + to_wall_s <= time_s:  # the same sum as for the driver's spans: rounding keeps their order
                return step
        return self._starts[0][1] if self._starts else 0


# Order of the processes, by the first word of their names.
ROLES = ("driver", "actor", "engine", "scoring", "teacher")


class SpanLine(msgspec.Struct, frozen=True):
    """One line: spans of a process that start in a step."""

    step: int
    process: str
    host: str
    spans: tuple[Span, ...]  # on the clock of the host


def read_spans(path: Path) -> list[SpanLine]:
    """Return the lines of spans.jsonl, without an incomplete last one.

    Raises:
        CheckpointError: the file cannot be read, or a line is not valid; names the line.
    """
    lines = []
    for number, line in enumerate(read_metrics(path), start=1):
        try:
            decoded = msgspec.convert(line, SpanLine)
            sort_key(decoded.process)
            for span in decoded.spans:
                if not (math.isfinite(span.start_s) and 0 <= span.duration_s < math.inf):
                    raise ValueError(f"{span!r} is not a span")
        except (msgspec.ValidationError, ValueError) as error:
            fix = "delete that line to continue"
            raise CheckpointError(f"{path}: line {number} is not a line of spans ({error!r}); {fix}") from error
        lines.append(decoded)
    return lines


def sort_key(process: str) -> tuple[int, int, str]:
    """Return the key that orders processes: driver, actor, engines, scoring, teacher; each by number."""
    role, _, rest = process.partition(" ")
    return ROLES.index(role), int(rest) if rest.isdecimal() else 0, rest
