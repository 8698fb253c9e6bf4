"""Stage timers, and a file with one JSON line per step.

Names carry a prefix and a unit. Prefixes: loss/ domain/ reward/ teacher/ rollout/ staleness/ weight_sync/ time/ memory/
optim/ eval/ perf/ health/.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from gkd.errors import CheckpointError
from gkd.files.disk import make_folder, naming, replace_file
from gkd.log import activities


class StageTimers:
    """Measure the wall-clock time of each stage of one step.

    Stages do not nest, so their sum is at most the step's wall time. `time/accounted_share` is their share of it.

    Args:
        on_stage: receives each stage that has ended: name, start and end on the clock.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        on_stage: Callable[[str, float, float], None] = lambda name, began_s, ended_s: None,
    ) -> None:
        self._clock, self._on_stage = clock, on_stage
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
            with activities.during(stage.replace("_", " ")):
                yield
        finally:
            ended = self._clock()
            self._stages[stage] = self._stages.get(stage, 0.0) + ended - began
            self._open = None
            self._on_stage(stage, began, ended)

    def report(self) -> dict[str, float]:
        """Return `time/<stage>_s` of each stage so far, `time/step_s` and `time/accounted_share`."""
        total = self._clock() - self._start
        report = {f"time/{stage}_s": seconds for stage, seconds in self._stages.items()}
        report["time/step_s"] = total
        report["time/accounted_share"] = sum(self._stages.values()) / total if total > 0 else 1.0
        return report


class MetricsWriter:
    """Append one JSON object per line, unbuffered, so that a killed run keeps every line.

    Args:
        keep_through: drop the lines of later steps first, so that a run that resumes from step 10 has one line for
            step 11. -1: start an empty file.

    Raises:
        CheckpointError: the file cannot be written, or a kept line is not valid.
    """

    def __init__(self, path: Path, keep_through: int) -> None:
        self._path = path
        with naming(path):
            make_folder(path.parent)
            lines = read_metrics(path) if keep_through >= 0 and path.exists() else []
            kept = "".join(json.dumps(line) + "\n" for line in lines if line["step"] <= keep_through)
            replace_file(path, kept.encode())
            self._file = path.open("ab", buffering=0)  # closing it writes nothing, so it cannot fail

    def write(self, step: int, metrics: dict[str, float]) -> None:
        """Append a line. Raises CheckpointError: it cannot be written; the file may hold a part of it."""
        # JSON has no NaN.
        clean = {k: (v if math.isfinite(v) else None) for k, v in metrics.items()}
        self.append((json.dumps({"step": step, **clean}) + "\n").encode())

    def append(self, left: bytes) -> None:
        """Append whole lines, each a JSON object with a "step". Raises as `write`."""
        with naming(self._path):
            while left:
                left = left[self._file.write(left) :]

    def sync(self) -> None:
        """Flush all lines to disk; call it before a checkpoint that follows them. Raises CheckpointError."""
        with naming(self._path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, float]]:
    """Return the lines of a metrics file, without an incomplete last line of a killed run.

    Raises:
        CheckpointError: the file cannot be read, or a line is not valid; names the line.
    """
    with naming(path, "read"):
        lines = path.read_bytes().split(b"\n")[:-1]
    return [_parsed(path, number, line) for number, line in enumerate(lines, start=1) if line]


def _parsed(path: Path, number: int, line: bytes) -> dict[str, float]:
    try:
        content = json.loads(line)
    except ValueError as error:  # JSON's and UTF-8's errors alike
        problem = f"is not valid JSON ({error})"
    else:
        if isinstance(content, dict) and type(content.get("step")) is int:
            return content
        problem = "has no step"
    raise CheckpointError(f"{path}: line {number} {problem}; delete that line, or restore the file, to continue")
