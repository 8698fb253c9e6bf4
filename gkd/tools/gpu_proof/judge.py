"""Judge a stage of gpu_proof by what it has left.

That is the figures of `tests/bench/teacher_report.py` from a benchmark, or JUnit XML from pytest.
"""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PASS, FAIL, SKIPPED, ERROR, TIMED_OUT = "pass", "fail", "skipped", "error", "timed out"
_NO_TESTS = 5  # pytest's exit code


@dataclass(slots=True)
class Outcome:
    """The end of a stage. `figures`: name, value, unit, goal, met, note of each."""

    verdict: str
    reason: str = ""
    seconds: float = 0.0
    figures: list[dict[str, Any]] = field(default_factory=list)
    command: list[str] = field(default_factory=list)


def headline(figures: Sequence[dict[str, Any]], name: str) -> dict[str, Any] | None:
    """Return the figure for the table: the first whose name begins with `name`."""
    return next((figure for figure in figures if figure["name"].startswith(name)), None)


def judged(code: int, results: Path, junit: Path, log: Path) -> Outcome:
    """Return the verdict of a stage that has ended by itself."""
    try:
        if junit.exists():
            return _judged_tests(code, junit, log)
        found = json.loads(results.read_text())["parts"]
        figures = [figure for part in found.values() for figure in part["figures"]]
    except (OSError, ValueError, KeyError, TypeError, ET.ParseError):
        return Outcome(ERROR, f"exit code {code} without results; {log.name} ends: {last_line(log)}")
    missed = [
        f"{f['name']} = {f['value']:.4g}, {f['goal']} wanted{': ' if f['note'] else ''}{f['note']}"
        for f in figures
        if f["met"] is False
    ]
    if missed:
        return Outcome(FAIL, "; ".join(missed), figures=figures)
    if code or not figures:
        return Outcome(ERROR, f"exit code {code}; {log.name} ends: {last_line(log)}", figures=figures)
    return Outcome(PASS, figures=figures)


def _judged_tests(code: int, junit: Path, log: Path) -> Outcome:
    suite = next(ET.parse(junit).getroot().iter("testsuite"))
    cases = list(suite.iter("testcase"))
    bad = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = [case.find("skipped") for case in cases if case.find("skipped") is not None]
    passed = len(cases) - len(bad) - len(skipped)
    goal = f">= {len(cases) - len(skipped)}"
    figure = {"name": "tests passed", "value": passed, "unit": "", "goal": goal, "met": not bad, "note": ""}
    if bad:
        names = ", ".join(str(case.get("name")) for case in bad[:3])
        return Outcome(FAIL, f"{len(bad)} failed: {names}{' ...' if len(bad) > 3 else ''}", figures=[figure])
    if code not in (0, _NO_TESTS):
        return Outcome(
            ERROR, f"pytest ended with exit code {code}; {log.name} ends: {last_line(log)}", figures=[figure]
        )
    if not passed:
        reasons = {str(skip.get("message")) for skip in skipped if skip is not None}
        return Outcome(SKIPPED, "; ".join(sorted(reasons))) if skipped else Outcome(ERROR, "no test was found")
    return Outcome(PASS, figures=[figure])


def last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip()[:200] if lines else "(empty)"
