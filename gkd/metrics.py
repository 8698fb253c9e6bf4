"""Numbers of a run: stage timers that add up, and one JSON line a step.

Names carry a prefix (loss/ teacher/ rollout/ staleness/ weight_sync/ time/ optim/ eval/ perf/) and a unit.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


class StageTimers:
    """Wall-clock time of each stage of one step.

    Stages follow one another and never nest, so their sum is at most the step's wall time and what is
    missing is time nobody accounts for; `report` gives that share as `time/accounted_share`.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._start = clock()
        self._stages: dict[str, float] = {}
        self._open: str | None = None

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        if self._open is not None:
            raise RuntimeError(f"stage {stage} starts inside stage {self._open}; stages do not nest")
        self._open = stage
        began = self._clock()
        try:
            yield
        finally:
            self._stages[stage] = self._stages.get(stage, 0.0) + self._clock() - began
            self._open = None

    def report(self) -> dict[str, float]:
        """`time/<stage>_s` of each stage, `time/step_s`, `time/accounted_share`."""
        total = self._clock() - self._start
        report = {f"time/{stage}_s": seconds for stage, seconds in self._stages.items()}
        report["time/step_s"] = total
        report["time/accounted_share"] = sum(self._stages.values()) / total if total > 0 else 1.0
        return report


class MetricsWriter:
    """Appends one JSON object a line; flushed each time, so a killed run keeps all it reported.

    Args:
        keep_through: lines of later steps are dropped first: a run that resumes from step 10 reports step 11 once,
            however far it had come before. -1 = start anew.
    """

    def __init__(self, path: Path, keep_through: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            kept = [line for line in read_metrics(path) if line["step"] <= keep_through]
            fresh = path.with_suffix(".tmp")
            fresh.write_text("".join(json.dumps(line) + "\n" for line in kept))
            fresh.replace(path)
        self._file = path.open("a")

    def write(self, step: int, metrics: dict[str, float]) -> None:
        # JSON has no NaN; a reader must see null, not a line its parser refuses.
        clean = {k: (v if math.isfinite(v) else None) for k, v in metrics.items()}
        self._file.write(json.dumps({"step": step, **clean}) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, float]]:
    """The lines of a metrics.jsonl; a last line that a killed run left half-written is left out."""
    lines = path.read_text().split("\n")
    return [json.loads(line) for line in lines[:-1] if line]
