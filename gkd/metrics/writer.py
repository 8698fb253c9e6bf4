"""Append one JSON line per step to a file, and read it.

Names carry a prefix and a unit. Prefixes: loss/ domain/ reward/ teacher/ rollout/ staleness/ weight_sync/ time/ memory/
optim/ eval/ perf/ health/.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gkd.errors import CheckpointError
from gkd.run.disk import make_folder, naming, replace_file


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
    """Return the lines of a metrics file. Raises as `json_lines`, also for a line without a step."""
    lines = []
    for number, line in json_lines(path):
        if type(line.get("step")) is not int:
            raise _bad_line(path, number, "has no step")
        lines.append(line)
    return lines


def json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield number and object of each line of a file, without an incomplete last line of a killed run.

    Raises:
        CheckpointError: the file cannot be read, or a line is not a JSON object; names the line.
    """
    with naming(path, "read"):
        lines = path.read_bytes().split(b"\n")[:-1]
    for number, line in enumerate(lines, start=1):
        try:
            content = json.loads(line) if line else {}
        except ValueError as error:  # JSON's and UTF-8's errors alike
            raise _bad_line(path, number, f"is not valid JSON ({error})") from error
        if not isinstance(content, dict):
            raise _bad_line(path, number, "is not a JSON object")
        if line:
            yield number, content


def _bad_line(path: Path, number: int, problem: str) -> CheckpointError:
    return CheckpointError(f"{path}: line {number} {problem}; delete that line, or restore the file, to continue")
