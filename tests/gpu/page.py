"""Write the section "On an NVIDIA H200" of docs/results.md from the figure files: `python -m tests.pages` calls it.

A row of the table is a stage of `tests.gpu_proof`. Rows of twelve_minutes.json replace those of gpu_proof_h200.json
with the same name; `notes` in a file are sentences about its figures, which follow the table. Rows of rehearsals and
of skipped stages do not hold measurements, so they are left out. Of gpu_proof_h200.json only medians are shown.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.bench.teacher_report import show
from tests.gpu_proof.stages import TWELVE_MINUTES

FILES = ("gpu_proof_h200.json", "twelve_minutes.json")
SHOWN = 2  # figures of a stage, besides those that missed their bar


def section(results: Path) -> str:
    """Return the Markdown of the section without its heading."""
    rows: dict[str, dict[str, Any]] = {}
    newest: set[str] = set()  # stages of the last file
    machines: dict[str, None] = {}  # in the order of the rows, each once
    notes: list[str] = []
    for name in FILES:
        if (results / name).exists():
            found = json.loads((results / name).read_text())
            for stage, row in found["stages"].items():
                if row["verdict"] != "skipped" and not row.get("tiny") and row.get("device") != "cpu":
                    rows[stage] = row
                    newest |= {stage} if name == FILES[-1] else set()
                    machines[f"- {_machine(row.get('machine') or found['machine'])}: [figures](results/{name})."] = None
            notes += found.get("notes", [])
    lines = [*machines, "", "| stage | commit | verdict | figures |", "|---|---|---|---|"]
    lines += [f"| `{stage}` | {row['commit'][:8]} | {_verdict(row)} | {_figures(row)} |" for stage, row in rows.items()]
    if missing := [stage.name for stage in TWELVE_MINUTES if stage.name not in rows]:
        lines += ["", f"Not measured yet: {', '.join(f'`{name}`' for name in missing)}."]
    for stage, row in rows.items():
        shown = [table for table in row.get("tables", ()) if stage in newest or table["title"] == "medians"]
        lines += [line for table in shown for line in _table(stage, table)]
    return "\n".join([*lines, *(f"\n{note}" for note in notes), ""])


def _machine(machine: Mapping[str, Any]) -> str:
    gpus = machine["gpus"]
    card = f"{len(gpus)} x {gpus[0]['name']} ({gpus[0]['mib'] / 1024:.0f} GiB)" if gpus else "no GPU"
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items() if version is not None)
    return f"{card}, driver {machine['driver']}, {machine['cpus']} cores, Python {machine['python']}, {versions}"


def _table(stage: str, table: Mapping[str, Any]) -> list[str]:
    """Return a table of a stage. Line ends in responses of a model become spaces."""
    rows = [
        " | ".join(
            " ".join((cell if isinstance(cell, str) else show(cell)).split()).replace("|", r"\|") for cell in row
        )
        for row in table["rows"]
    ]
    title = f"`{stage}`: {table['title']}".removesuffix(": ")
    head = [f"| {' | '.join(table['columns'])} |", "|---" * len(table["columns"]) + "|"]
    return ["", title, "", *head, *(f"| {row} |" for row in rows)]


def _verdict(row: Mapping[str, Any]) -> str:
    return "pass" if row["verdict"] == "pass" else f"**{row['verdict']}**"


def _figures(row: Mapping[str, Any]) -> str:
    """Return what missed its bar first, then the first of the other figures."""
    missed = [f"{_figure(figure)}, bar {figure['goal']}" for figure in row["figures"] if figure.get("met") is False]
    others = [_figure(figure) for figure in row["figures"] if figure.get("met") is not False]
    more = [f"{len(others) - SHOWN} more"] if len(others) > SHOWN else []
    is_told = missed or (row["verdict"] == "pass" and others)
    reason = [] if is_told else [re.sub(r"passed(.*) in [\d.]+s$", r"passed\1", row["reason"])]
    return "; ".join([*missed, *others[:SHOWN], *more, *reason]).replace("|", r"\|")


def _figure(figure: Mapping[str, Any]) -> str:
    return f"{figure['name']} {show(figure['value'])} {figure.get('unit', '')}".rstrip()
