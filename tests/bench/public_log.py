"""List the problems of other systems' users that were tried, and the tests that show what happens now.

`python -m tests.bench.public_inputs --only log` runs these tests and writes the table.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from pathlib import Path

from tests.bench.teacher_report import Figure, Part, Table

_ROOT = Path(__file__).resolve().parents[2]
_LOG = Path(__file__).with_suffix(".txt")


def measure() -> Part:
    """Run the tests of the log, and return a row for each problem."""
    text = [line for line in _LOG.read_text().splitlines() if not line.startswith("#")]
    lines = [[cell.strip() for cell in line.split(" | ")] for line in text]
    passed = _run(sorted({test for *_, tests in lines if tests[0] != "-" for test in tests.split()}))
    rows, failed = [], 0
    for number, problem, before, now, tests in lines:
        is_run = tests[0] != "-"
        n = sum(passed[test] for test in tests.split()) if is_run else 0
        is_shown = is_run and all(passed[test] > 0 for test in tests.split())
        failed += is_run and not is_shown
        shown = f"{n} tests pass" if is_shown else "TESTS FAIL" if is_run else tests.removeprefix("- ")
        rows.append((number, problem, before, now, shown))
    table = Table("log", ("id", "problem", "at 9cae5fc", "now", "shown by"), rows)
    figures = [Figure("problems whose tests fail", failed, at_most=0)]
    return Part("log", "Problems of other systems' users.", figures, (table,))


def _run(tests: list[str]) -> dict[str, int]:
    """Return how many tests begin with each of these names and pass; -1 if one fails or is skipped."""
    files = sorted({f"tests/{test.partition('::')[0]}" for test in tests})
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        names = " or ".join(sorted({test.partition("::")[2] for test in tests if test.partition("::")[2]}))
        whole = [file for file in files if f"{file.removeprefix('tests/')}" in tests or f"{file[6:]}::" in tests]
        for i, (chosen, words) in enumerate(((files, ["-k", names]), (whole, []))):
            command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={report}.{i}", *words, *chosen]
            subprocess.run(command, cwd=_ROOT, env=os.environ | {"PYTHONPATH": str(_ROOT)}, check=False)
        cases = [case for i in range(2) for case in ET.parse(f"{report}.{i}").iter("testcase")]
    found = dict.fromkeys(tests, 0)
    for test in tests:
        file, _, name = test.partition("::")
        module = "tests." + file.removesuffix(".py").replace("/", ".")
        of_test = [c for c in cases if c.get("classname", "").startswith(module) and c.get("name", "").startswith(name)]
        results = {
            c.get("name"): not any(c.find(bad) is not None for bad in ("failure", "error", "skipped")) for c in of_test
        }
        found[test] = sum(results.values()) if results and all(results.values()) else -1 if results else 0
    return found
