"""Read run_dir/spans.jsonl, see `gkd.metrics.span_file`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gkd.errors import CheckpointError
from gkd.handles import Span
from gkd.metrics.writer import read_metrics

# Order of the processes, by the first word of their names.
ROLES = ("driver", "actor", "engine", "scoring", "teacher")


@dataclass(frozen=True, slots=True)
class SpanLine:
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
            lines.append(_parsed(line))
        except (KeyError, TypeError, ValueError) as error:
            fix = "delete that line to continue"
            raise CheckpointError(f"{path}: line {number} is not a line of spans ({error!r}); {fix}") from error
    return lines


def sort_key(process: str) -> tuple[int, int, str]:
    """Return the key that orders processes: driver, actor, engines, scoring, teacher; each by number."""
    role, _, rest = process.partition(" ")
    return ROLES.index(role), int(rest) if rest.isdecimal() else 0, rest


def _parsed(line: dict[str, Any]) -> SpanLine:
    spans = []
    for span in line["spans"]:
        start_s, duration_s, args = float(span["start_s"]), float(span["duration_s"]), span.get("args", {})
        if not (math.isfinite(start_s) and 0 <= duration_s < math.inf and isinstance(args, dict)):
            raise ValueError(f"{span!r} is not a span")
        spans.append(Span(str(span["name"]), start_s, duration_s, args))
    process = str(line["process"])
    sort_key(process)
    return SpanLine(int(line["step"]), process, str(line["host"]), tuple(spans))
