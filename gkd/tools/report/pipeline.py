"""Choose steps whose spans are drawn as a Gantt chart, and read these from spans.jsonl.

Shown are: the second step (the first one compiles and fills caches), the step with the median duration, the slowest one
after the first, and the last one. A chart covers the driver's spans of its step, and what all processes did meanwhile:
spans of neighboring steps are read, too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gkd.errors import CheckpointError
from gkd.run.disk import naming
from gkd.tools.report.read import Run

NEIGHBORS = 8  # steps before and after, whose spans may reach into the chosen one
MAX_SPANS = 400  # of one process in one chart; the longest ones
DRIVER = "driver"
_STEP = re.compile(rb'\s*{\s*"step":\s*(\d+)')


def charts(run: Run) -> list[dict[str, Any]] | None:
    """Return the charts of a run; None: there is no spans.jsonl.

    A chart has the step, the reason why it was chosen, its duration, and processes with rows of
    [name, start, duration, lane, args]; start is in seconds from the begin of the step.

    Raises:
        CheckpointError: spans.jsonl cannot be read, or a line is damaged.
    """
    file = run.root / "spans.jsonl"
    if not file.exists():
        return None
    available = {step for step, _ in _lines(file)}
    chosen = choose(run, available)
    near = {step + d for step in chosen for d in range(-NEIGHBORS, NEIGHBORS + 1)}
    lines = [_parsed(file, line) for step, line in _lines(file) if step in near]
    found = [_chart(step, ", ".join(reasons), lines) for step, reasons in chosen.items()]
    return [chart for chart in found if chart is not None]


def choose(run: Run, available: set[int]) -> dict[int, list[str]]:
    """Return step -> reasons, ascending.

    Args:
        available: steps with spans.
    """
    curve = run.curves.get("time/step_s")
    pairs = [] if curve is None else zip(curve.steps, curve.values, strict=True)
    durations = {step: value for step, value in pairs if value is not None and step in available and step > 1}
    if not durations:
        return {step: ["the first one with spans"] for step in sorted(available - {0})[:1]}
    by_duration = sorted(durations, key=lambda step: (durations[step], step))
    reasons: dict[int, list[str]] = {}
    for step, reason in (
        (min(durations), "first after warm-up"),
        (by_duration[len(by_duration) // 2], "median duration"),
        (by_duration[-1], "slowest"),
        (max(durations), "last"),
    ):
        reasons.setdefault(step, []).append(reason)
    return dict(sorted(reasons.items()))


def _chart(step: int, reason: str, lines: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    own = [s for line in lines if line["step"] == step and line["process"] == DRIVER for s in line["spans"]]
    own = own or [s for line in lines if line["step"] == step for s in line["spans"]]
    if not own:
        return None
    begin = min(s["start_s"] for s in own)
    end = max(s["start_s"] + s["duration_s"] for s in own)
    processes: dict[str, list[list[Any]]] = {}
    for line in lines:
        rows = processes.setdefault(line["process"], [])
        for s in line["spans"]:
            start, stop = max(s["start_s"], begin), min(s["start_s"] + s["duration_s"], end)
            if stop > start or (begin <= s["start_s"] <= end and s["duration_s"] == 0):
                args = {key: value for key, value in s.get("args", {}).items() if key != "lane"}
                lane = s.get("args", {}).get("lane", 0)
                rows.append([s["name"], round(start - begin, 6), round(max(stop - start, 0.0), 6), lane, args])
    kept = [
        {"process": name, "idle": _idle(rows, end - begin), "n_left_out": max(len(rows) - MAX_SPANS, 0)}
        | {"spans": sorted(sorted(rows, key=lambda row: -row[2])[:MAX_SPANS], key=lambda row: row[1])}
        for name, rows in sorted(processes.items(), key=lambda item: _order(item[0]))
    ]
    return {"step": step, "reason": reason, "duration": end - begin, "processes": kept}


def _idle(rows: Sequence[Sequence[Any]], duration: float) -> float:
    """Return the share of the time that no span covers."""
    covered, until = 0.0, 0.0
    for _, start, length, *_ in sorted(rows, key=lambda row: row[1]):
        covered += max(start + length - max(start, until), 0.0)
        until = max(until, start + length)
    return max(1 - covered / duration, 0.0) if duration > 0 else 0.0


def _order(process: str) -> tuple[int, str, int]:
    """Order processes as the data flow: driver, engines, scoring, teacher, actor."""
    kind, _, rest = process.partition(" ")
    kinds = (DRIVER, "engine", "scoring", "teacher", "actor")
    number = re.search(r"\d+", rest)
    return kinds.index(kind) if kind in kinds else len(kinds), kind, int(number[0]) if number else 0


def _lines(file: Path) -> Iterator[tuple[int, bytes]]:
    """Yield step and text of each complete line; most lines need not be decoded."""
    with naming(file, "read"), file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.endswith(b"\n") and line.strip():
                found = _STEP.match(line)
                if found is None:
                    raise CheckpointError(f"{file}: line {number} does not begin with a step; delete it")
                yield int(found[1]), line


def _parsed(file: Path, line: bytes) -> dict[str, Any]:
    try:
        content = json.loads(line)
        if {"step", "process", "spans"} <= content.keys():
            return content
        problem = "lacks step, process or spans"
    except ValueError as error:
        problem = f"is not valid JSON ({error})"
    raise CheckpointError(f"{file}: the line {line[:60]!r} {problem}; delete it, or restore the file")
