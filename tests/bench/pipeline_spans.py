"""Divide the steps of a run into what the driver waited for; for bench_pipeline.

Each stage of the driver is divided by what the processes did meanwhile (spans.jsonl): "train" is the actor's
computation while a rank computes. The rest, and the time between two stages, is divided by what the driver did
(`tests.bench.driver_calls`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from gkd.metrics.span_file import read_spans
from tests.bench.driver_calls import UNKNOWN, Interval, read_calls

# Stage of the driver -> (prefix of the process, span, name of the part); the first that was active counts.
COMPUTED: dict[str, tuple[tuple[str, str, str], ...]] = {
    "rollout": (("engine", "generate", "generate"), ("teacher", "compute", "teacher compute")),
    "teacher": (
        ("teacher", "compute", "teacher compute"),
        ("scoring", "score", "teacher: endpoint, wire"),
        ("engine", "generate", "generate"),
    ),
    "train": (("actor", "train", "train compute"),),
    "weight_sync": (
        ("engine", "receive", "weights"),
        ("actor", "sync", "weights"),
        ("engine", "generate", "pass ends"),
    ),
}
COMPUTE = ("generate", "teacher compute", "train compute", "weights")


def kinds_s(parts: Mapping[str, float]) -> dict[str, float]:
    """Return kind -> seconds: "compute", the kinds of `tests.bench.driver_calls`, and other spans of processes."""
    kinds: defaultdict[str, float] = defaultdict(float)
    for part, value in parts.items():
        kinds["compute" if part in COMPUTE else part.rpartition(": ")[2]] += value
    return dict(kinds)


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the same time as disjoint intervals in order."""
    joined: list[Interval] = []
    for start, end in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((start, end))
    return joined


def within(intervals: Sequence[Interval], start: float, end: float) -> list[Interval]:
    """Return the parts of disjoint intervals between two times."""
    return [(max(a, start), min(b, end)) for a, b in intervals if a < end and b > start]


def without(intervals: Sequence[Interval], removed: Sequence[Interval]) -> list[Interval]:
    """Return the time of `intervals` that is not in `removed`; both are disjoint and in order."""
    left: list[Interval] = []
    for start, end in intervals:
        for a, b in within(removed, start, end):
            if a > start:
                left.append((start, a))
            start = b
        if start < end:
            left.append((start, end))
    return left


def seconds(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)


class RunSpans:
    """The spans of a run between the starts of two of its steps.

    Args:
        calls: the driver's, see `DriverCalls.take`.
        first, last: steps; `last` is not included.
    """

    def __init__(self, run: Path, calls: Path, first: int, last: int) -> None:
        driver: dict[int, list[tuple[float, float, str]]] = defaultdict(list)
        self._busy: dict[tuple[str, str], list[Interval]] = defaultdict(list)
        for line in read_spans(run / "spans.jsonl"):
            for span in line.spans:
                interval = span.start_s, span.start_s + span.duration_s
                if line.process == "driver":
                    driver[line.step].append((*interval, span.name))
                else:
                    name = "receive" if span.name.startswith("receive") and "engine" in line.process else span.name
                    self._busy[line.process, name].append(interval)
        self._n_steps = last - first
        self._start, self._end = min(driver[first])[0], min(driver[last])[0]
        self._stages = sorted(stage for step in range(first, last) for stage in driver[step])
        self._calls = [
            (kind, within(union(intervals), self._start, self._end)) for kind, intervals in read_calls(calls)
        ]

    def step_s(self) -> float:
        return (self._end - self._start) / self._n_steps

    def busy_s(self, process: str, span: str) -> float:
        """Return the seconds a step that the busiest process of this kind spends in this span."""
        totals = [
            seconds(within(union(intervals), self._start, self._end))
            for (name, kind), intervals in self._busy.items()
            if name.startswith(process) and kind == span
        ]
        return max(totals, default=0.0) / self._n_steps

    def stage_s(self, stage: str) -> float:
        """Return the seconds a step that the driver spends in one of its stages."""
        return sum(end - start for start, end, name in self._stages if name == stage) / self._n_steps

    def breakdown(self) -> dict[str, float]:
        """Return part -> seconds a step, which add up to the step; a part is a computation, or "stage: kind"."""
        parts: defaultdict[str, float] = defaultdict(float)
        for start, end, stage in self._stages:
            left = [(start, end)]
            for process, span, part in COMPUTED.get(stage, ()):
                kinds = [
                    i
                    for (name, kind), every in self._busy.items()
                    if name.startswith(process) and kind == span
                    for i in every
                ]
                left = self._divide(left, part, union(kinds), parts)
            self._divide_by_calls(left, stage, parts)
        stages = [(start, end) for start, end, _ in self._stages]
        self._divide_by_calls(without([(self._start, self._end)], stages), "between stages", parts)
        return {part: value / self._n_steps for part, value in parts.items()}

    def _divide_by_calls(self, left: list[Interval], stage: str, parts: dict[str, float]) -> None:
        for kind, intervals in self._calls:
            left = self._divide(left, f"{stage}: {kind}", intervals, parts)
        parts[f"{stage}: {UNKNOWN}"] += seconds(left)

    @staticmethod
    def _divide(left: list[Interval], part: str, active: Sequence[Interval], parts: dict[str, float]) -> list[Interval]:
        """Add the time of `left` that is active to a part; return the rest."""
        rest = without(left, active)
        parts[part] += seconds(left) - seconds(rest)
        return rest
