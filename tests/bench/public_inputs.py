"""Run the tests of the problems that users of such systems reported, and print for each: id, what is right, what came.

    python -m tests.bench.public_inputs [--only ID,..] [--json FILE]

`public_inputs.txt` has the problems. It takes about 6 minutes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from tests.bench.command import ROOT, parsed, parser, run_parts
from tests.bench.teacher_report import Figure, Part, Table

_TEXT = Path(__file__).with_suffix(".txt").read_text()
_LINES = [line.split(" | ") for line in _TEXT.splitlines() if not line.startswith("#")]
CASES = {number: (problem, right, tests.split()) for number, problem, right, tests in _LINES}


def main() -> int:
    args = parsed(parser("tests.bench.public_inputs", __doc__ or "", CASES), CASES, None)
    chosen = args.only.split(",")
    args.only = "public_inputs"
    return run_parts(args, lambda _: _measured(chosen), levels=4)


def _measured(chosen: list[str]) -> Part:
    results = _run(sorted({test for number in chosen for test in CASES[number][2]}))
    rows = []
    n_wrong = 0
    for number in chosen:
        problem, right, tests = CASES[number]
        missing = [f"{test} did not run" for test in tests if not results[test]]
        failures = [text for test in tests for text in results[test] if text]
        n_wrong += bool(missing or failures)
        n = sum(len(results[test]) for test in tests)
        rows.append((number, problem, right, (missing + failures or [f"right ({n} tests)"])[0][:200]))
    table = Table("cases", ("id", "problem", "expected", "got"), rows)
    figures = [Figure("problems that are wrong", n_wrong, at_most=0)]
    return Part("public_inputs", "Problems of other systems' users, and what happens here.", figures, (table,))


def _run(tests: list[str]) -> dict[str, list[str]]:
    """Return for each test, or file of tests, the problem of each of its cases; empty: the case passed."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", *(f"tests/{test}" for test in tests)]
        subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=False)
        cases = list(ElementTree.parse(report).iter("testcase"))
    found = dict[str, list[str]]()
    for test in tests:
        file, *names = test.split("::")
        name = ".".join(["tests", *file.removesuffix(".py").split("/"), *names])
        ids = [f"{case.get('classname')}.{case.get('name', '').partition('[')[0]}." for case in cases]
        found[test] = [_problem(case) for case, own in zip(cases, ids, strict=True) if own.startswith(f"{name}.")]
    return found


def _problem(case: ElementTree.Element) -> str:
    bad = next((part for kind in ("failure", "error", "skipped") if (part := case.find(kind)) is not None), None)
    return "" if bad is None else f"{case.get('name')}: {bad.get('message')}"


if __name__ == "__main__":
    sys.exit(main())
