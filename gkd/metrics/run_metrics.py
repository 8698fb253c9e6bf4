"""Put the numbers of each step together, as one line in metrics.jsonl.

The trackers of `trainer.loggers` get the line of metrics.jsonl, too. spans.jsonl gets what each process did.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple
from statistics import fmean

from gkd.config.schedule import value_at
from gkd.config.schema import Config
from gkd.console.state import STEP_LINE, RunState, step_line
from gkd.log import get_logger
from gkd.metrics.health import HealthResponse
from gkd.metrics.span_file import SpanFile
from gkd.metrics.step import restart_numbers, reward_numbers, shares, step_numbers, store_numbers, turn_numbers
from gkd.metrics.trackers import Trackers
from gkd.metrics.writer import MetricsWriter, read_metrics
from gkd.roles import Roles
from gkd.run.folder import RunFolder
from gkd.spans import Block, Phase, Stage, driver
from gkd.types import EngineRestarts, RolloutUsage, ScoredChunk, SyncReport, TrainStats

log = get_logger("trainer")


class StepMetrics:
    """The numbers of one step while it runs.

    Attributes:
        step: the optimizer step that is being made, from 1; before the first step the number of steps made.
        is_trained: the optimizer step is made, so the line is written whatever happens next.
        engine_busy_s: seconds in passes, mean over the engines; None: they are not known for this step alone.

    Args:
        spans: writes the stages.
    """

    def __init__(self, step: int, spans: SpanFile | None = None) -> None:
        self.step = step
        self._began_s = driver.clock()
        if spans is not None:
            spans.begin(step)
        self.numbers: dict[str, float] = {}
        self.is_trained = False
        self.engine_busy_s: float | None = None

    def stage(self, name: Stage) -> Block:
        """Return a context manager that measures a stage. Stages do not nest, so they add up."""
        return driver.span(name, outermost=True)

    def times(self) -> dict[str, float]:
        """Return `time/<stage>_s` of each stage so far, `time/step_s`, and the share of the stages in it."""
        seconds = driver.seconds_since(self._began_s)
        total = driver.clock() - self._began_s
        accounted = sum(seconds.values()) / total if total > 0 else 1.0
        stages = {f"time/{stage}_s": stage_s for stage, stage_s in seconds.items()}
        return stages | {"time/step_s": total, "time/accounted_share": accounted}

    def add(self, numbers: Mapping[str, float]) -> None:
        """Add numbers to the line in metrics.jsonl."""
        self.numbers |= numbers


class RunMetrics:
    """The metrics of a run.

    Attributes:
        state: what the terminal shows of the run.
    """

    def __init__(self, config: Config, roles: Roles, folder: RunFolder, total_steps: int) -> None:
        self._config = config
        self._actor = roles.actor
        self._rollout = roles.rollout
        self._folder = folder
        self._scoring = roles.scoring
        self._remark = roles.remark
        self._scheduler = config.trainer.scheduler
        self._total_steps = total_steps
        self._overlapped_evaluation = False
        self._restarts = EngineRestarts()  # since the last line, also during an evaluation
        self._files: list[MetricsWriter] = []
        self._trackers: Trackers | None = None
        self._health = HealthResponse(config, folder.root, total_steps)
        self.state = RunState(total_steps)

    def add_scored(self, batch: Sequence[ScoredChunk]) -> None:
        """Add a batch that the teacher has scored."""
        self._spans.add_scored(batch)

    def open(self, resumed_at: int | None) -> None:
        """Open the trackers and the files, without the lines after step `resumed_at`. None means a new run.

        Raises CheckpointError: a file of the run folder cannot be read, written or deleted.
        """
        keep_through = -1 if resumed_at is None else resumed_at
        self._trackers = Trackers(self._config, self._folder, resumed_at)
        self._folder.forget_after(keep_through)
        files = (self._folder.metrics_file, self._folder.spans_file)
        self._files = [MetricsWriter(file, keep_through) for file in files]
        servers = sorted({route.teacher.server_ip for route in self._config.derived.routes})
        self._spans = SpanFile(self._files[1], ", ".join(servers))
        past = read_metrics(self._folder.metrics_file)
        self._health.replay(past)
        for line in past:
            self.state.add_past(int(line["step"]), line)
        self.state.step = self.state.first_step = resumed_at or 0  # a branch has no lines of the steps before it

    @contextmanager
    def before_first_step(self, step: int) -> Iterator[StepMetrics]:
        """Measure what comes before the first step of this start; a line is written if numbers were added."""
        m = StepMetrics(step, self._spans)
        with driver.doing("before the first step"):
            yield m
            memory = self._memory(m)  # read anyway: it must not count for the first step
        if m.numbers:
            m.add(memory | m.times())
            self.state.add(step, self._write_line(step, m.numbers))
        self._spans.end()

    @contextmanager
    def of_step(self, step: int, save: Callable[[], object]) -> Iterator[StepMetrics]:
        """Measure a step. Once it is trained its line is written, also if its evaluation fails.

        Args:
            save: saves the step, if health.on_alarm pauses or stops the run.

        Raises HealthAlarm, DataError: see `HealthResponse.respond`.
        """
        m = StepMetrics(step, self._spans)
        try:
            with driver.doing(Phase.STEP, self._total_steps, step):
                yield m
                m.add(self._memory(m))
        finally:
            if m.is_trained:
                self._write(m)
            self._spans.end()
        log.info("%s", step_line(self.state, self._remark), extra=STEP_LINE)
        self._health.respond(save)

    def add_step(self, m: StepMetrics, batch: Sequence[ScoredChunk], stats: TrainStats, sync: SyncReport) -> None:
        """Add all numbers of an optimizer step, and what the engines did since the last one."""
        with m.stage("usage"):
            usage = self._usage()
        m.add(step_numbers(batch, stats, sync, version=m.step - 1, skip_first=self._config.distill.skip_first_tokens))
        m.add(reward_numbers(batch, self._config) | store_numbers(batch, self._config))
        m.add(turn_numbers(batch, self._config))
        schedules = self._config.trainer.schedules
        m.add({f"schedule/{key}": value_at(points, m.step - 1) for key, points in schedules.items()})
        m.add(usage.memory)
        m.add(restart_numbers(self._restarts))
        self._restarts = EngineRestarts()
        if usage.engines and not self._overlapped_evaluation:
            m.engine_busy_s = fmean(engine.busy_s for engine in usage.engines)
        self._overlapped_evaluation = False
        m.is_trained = True

    def exclude_evaluation(self, *, overlapped: bool) -> None:
        """Reset the engines' counters, so that an evaluation is not billed to the next step.

        Args:
            overlapped: a stream kept generating, and its work cannot be separated: mark the next step instead.
        """
        if overlapped:
            self._overlapped_evaluation = True
        else:
            self._usage()

    def log_memory(self) -> None:
        """Log the memory of what came after the last line, the last save and the export, and write its spans."""
        if numbers := self._memory(StepMetrics(self._total_steps, self._spans), last=True):
            log.info(
                "after the last step: %s",
                "  ".join(f"{k.replace('_', ' ')} {v:.3g}" for k, v in sorted(numbers.items())),
            )
        self._spans.end()

    def sync(self) -> None:
        """Flush all lines to disk. Raises CheckpointError."""
        for file in self._files:
            file.sync()

    def close(self) -> None:
        for file in self._files:
            file.close()
        if self._trackers is not None:
            self._trackers.close()

    def _memory(self, m: StepMetrics, *, last: bool = False) -> dict[str, float]:
        """Return the memory of the actor's phases since the last call, which also brings the spans of the ranks."""
        with m.stage("usage"):
            numbers = self._actor.memory_numbers()
            self._spans.add(self._actor.take_spans())
            self._spans.add_computations(self._scoring.take_computations(wait=last))
        return numbers

    def _usage(self) -> RolloutUsage:
        usage = self._rollout.usage()
        self._restarts = self._restarts.plus(*astuple(usage.restarts))
        self._spans.add(engine.spans for engine in usage.engines)
        return usage

    def _write(self, m: StepMetrics) -> None:
        m.add(m.times())
        m.add({"perf/response_tokens_per_s": m.numbers["rollout/response_tokens"] / m.numbers["time/step_s"]})
        m.add(shares(m.numbers, self._scheduler, m.engine_busy_s))
        self.state.add(m.step, self._write_line(m.step, m.numbers))

    def _write_line(self, step: int, numbers: dict[str, float]) -> dict[str, float]:
        line = {"time/unix_s": time.time(), **numbers, **self._health.numbers(step, numbers)}
        self._files[0].write(step, line)
        if self._trackers is not None:
            self._trackers.log(step, line)
        return line
