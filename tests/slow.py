"""Run all tests marked `slow`, file by file, and write a table: `bash launch/test.sh --slow`.

Each file has a time limit; a file that exceeds it is ended with all of its processes, and the next one begins. The
table is written after each file, so an interrupted run keeps what it has; rows of files that did not run are kept.

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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.processes import Commands
from tests.structure import ROOT

RESULTS = ROOT / "docs" / "results" / "slow_tests.json"
SELECTED = "slow and not bench and not gpu"
_COLUMNS = ("passed", "failed", "skipped", "seconds")


def files_with_slow_tests(where: Sequence[str]) -> list[str]:
    """Return the files below these paths that have such tests, in pytest's order. Raises SystemExit if it fails."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", SELECTED, *where]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 5):  # 5: none is selected
        raise SystemExit(f"pytest could not collect the tests:\n{done.stdout[-4000:]}{done.stderr[-2000:]}")
    ids = [line for line in done.stdout.splitlines() if "::" in line]
    return list(dict.fromkeys(line.partition("::")[0] for line in ids))


def run_file(commands: Commands, file: str, limit_s: float, log: Path) -> dict[str, Any]:
    """Run the slow tests of one file and return its row. The output is in `log`."""
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gkd_slow_") as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-m", SELECTED, f"--junit-xml={report}", file]
        with log.open("w") as output:
            status = commands.run(command, output, limit_s, ROOT)
        row = {"file": file, **_counts(report), "seconds": round(time.monotonic() - began_s)}
    if status is None:
        return row | {"problem": f"ended after {limit_s:.0f} s; no test counts"}
    if status not in (0, 1):
        return row | {"problem": f"pytest ended with exit status {status}"}
    return row


def _counts(report: Path) -> dict[str, int]:
    """Return the numbers of tests by outcome from a JUnit file, which pytest writes at its end; zeros without one."""
    if not report.exists():
        return {"passed": 0, "failed": 0, "skipped": 0}
    suite = ElementTree.parse(report).getroot()[0]
    n, *others = (int(suite.attrib[name]) for name in ("tests", "failures", "errors", "skipped"))
    return {"passed": n - sum(others), "failed": others[0] + others[1], "skipped": others[2]}


def write_table(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write these rows, and keep those of other files that still exist."""
    known = {row["file"]: row for row in (json.loads(path.read_text())["files"] if path.exists() else ())}
    known |= {row["file"]: row for row in rows}
    kept = [row for file, row in sorted(known.items()) if (ROOT / file).exists()]
    what = "tests marked slow, file by file; a row is as old as its commit"
    path.write_text(json.dumps({"what": what, "files": kept}, indent=1) + "\n")


def line(row: dict[str, Any]) -> str:
    """Return one line of the table."""
    return (
        f"{row['file']:44}" + "".join(f"{row[name]:>9}" for name in _COLUMNS) + f"  {row.get('problem', '')}".rstrip()
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="bash launch/test.sh --slow", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("where", metavar="PATH", nargs="*", help="files or folders of tests (default: all)")
    parser.add_argument("--limit", metavar="S", type=float, default=3600.0, help="seconds a file may take (3600)")
    parser.add_argument("--json", metavar="FILE", type=Path, default=RESULTS, help=f"({RESULTS.relative_to(ROOT)})")
    arguments = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # also where a shell's `&` had it ignored
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    commands, rows = Commands(), list[dict[str, Any]]()
    git = ["git", "log", "-1", "--format=%h"]
    commit = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    try:
        files = files_with_slow_tests(arguments.where)
        logs = Path(tempfile.mkdtemp(prefix="gkd_slow_logs_"))
        print(f"{len(files)} files have slow tests; output: {logs}\n")
        print(f"{'file':44}" + "".join(f"{name:>9}" for name in _COLUMNS), flush=True)
        for file in files:
            row = run_file(commands, file, arguments.limit, logs / f"{file.replace('/', '_')}.log")
            rows.append({**row, "commit": commit})
            write_table(arguments.json, rows)
            print(line(row), flush=True)
    except KeyboardInterrupt:
        print("interrupted; all test processes were ended", file=sys.stderr)
        return 130
    total = {"file": "all", **{name: sum(row[name] for row in rows) for name in _COLUMNS}}
    print(line(total))
    return int(any(row["failed"] or "problem" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
