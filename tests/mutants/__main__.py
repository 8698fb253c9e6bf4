"""Run the named tests against each mutant: `python -m tests.mutants --json mutants.json`.

Works on a temporary copy of the tree. First runs all named tests without a mutant, which must pass. Then, for each
mutant, changes one file of the copy and runs the mutant's tests: a failure or a timeout means that it is caught.

Exit status: 0 all are caught; 1 some survived; 2 a mutant does not fit the tree or the tests fail without it;
130 interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import queue
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.mutants.mutant import Mutant, problems
from tests.mutants.numerics import MUTANTS
from tests.processes import Commands
from tests.results import write_results

ROOT = Path(__file__).parents[2]
_COPIED = (
    *("gkd", "teacher_server", "tests", "configs", "docs", "examples", "launch"),
    *("pyproject.toml", "README.md", "CHANGELOG.md", "CONTRIBUTING.md"),
)
_LEFT_OUT = shutil.ignore_patterns("__pycache__", ".hypothesis", "*.egg-info")
_BASELINE_LIMIT_S = 1800.0


@dataclass(frozen=True, slots=True)
class Run:
    """One pytest process."""

    outcome: str  # passed | failed | timeout | error
    test: str  # id of the first failed test
    error: str  # type of its exception
    seconds: float
    output: str


class Runner:
    """Runs pytest on copies of the tree; `stop` ends all of its processes, from any thread."""

    def __init__(self, folder: Path, root: Path, jobs: int) -> None:
        self._folder, self._root, self._jobs = folder, root, jobs
        self._copies: queue.SimpleQueue[Path] = queue.SimpleQueue()
        self._commands = Commands()

    def baseline(self, mutants: Sequence[Mutant]) -> Run:
        """Copy the tree, run all named tests on the copy without a mutant, and make the other workers' copies."""
        first = self._folder / "0"
        first.mkdir()
        for name in _COPIED:
            source = self._root / name
            if source.is_dir():
                shutil.copytree(source, first / name, ignore=_LEFT_OUT)
            elif source.exists():
                shutil.copy2(source, first / name)
        tests = list(dict.fromkeys(test for mutant in mutants for test in mutant.test_ids(first)))
        run = self.pytest(first, tests, _BASELINE_LIMIT_S)
        self._copies.put(first)
        for i in range(1, self._jobs):
            # With the bytecode of the first, without the files of its tests.
            shutil.copytree(first, self._folder / str(i), ignore=shutil.ignore_patterns("tmp"))
            self._copies.put(self._folder / str(i))
        return run

    def check(self, mutant: Mutant, limit_s: float) -> Run:
        """Run a mutant's tests against it, on a copy that no other thread uses."""
        copy = self._copies.get()
        try:
            with mutant.applied(copy):
                return self.pytest(copy, mutant.test_ids(copy), limit_s)
        finally:
            self._copies.put(copy)

    def pytest(self, copy: Path, tests: Sequence[str], limit_s: float) -> Run:
        """Run these tests in `copy` until the first one fails. No process of the run is left afterwards."""
        environment = {"PYTHONPATH": str(copy), "COLUMNS": "500"}
        environment["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
        command += ["-m", "not slow and not bench and not gpu", f"--basetemp={copy / 'tmp'}", *tests]
        began_s = time.monotonic()
        with tempfile.TemporaryFile("w+", dir=self._folder, errors="replace") as output:
            status = self._commands.run(command, output, limit_s, copy, environment)
            output.seek(0)
            text = output.read()
        outcome = "timeout" if status is None else {0: "passed", 1: "failed"}.get(status, "error")
        test, error = _first_failure(text)
        return Run(outcome, test, error, time.monotonic() - began_s, text)

    def stop(self) -> None:
        """End all test runs, and let none begin."""
        self._commands.stop()


def _first_failure(output: str) -> tuple[str, str]:
    """Return (test id, exception type) of the first failure in pytest's summary; empty if there is none."""
    found = re.search(r"^(?:FAILED|ERROR) (tests/.+?)(?: - (.*))?$", output, re.MULTILINE)
    if found is None:
        return "", ""
    name = re.match(r"(?:\w+\.)*(\w+)", found[2] or "")
    kind = name[1] if name else ""
    return found[1], "AssertionError" if kind == "assert" else kind


def record(mutant: Mutant, run: Run) -> dict[str, Any]:
    """Return a mutant's entry in the JSON file."""
    outcome = {"failed": "caught", "passed": "survived"}.get(run.outcome, run.outcome)
    row = {"name": mutant.name, "file": mutant.locate(ROOT).as_posix(), "old": mutant.old, "new": mutant.new}
    return row | {"outcome": outcome, "test": run.test, "error": run.error, "seconds": round(run.seconds, 1)}


def run_all(mutants: Sequence[Mutant], jobs: int, limit_s: float) -> dict[str, Any] | None:
    """Run the baseline and all mutants, with progress on stdout. None: the tests fail without a mutant."""
    rows: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="gkd_mutants_") as folder:
        runner, pool = Runner(Path(folder), ROOT, jobs), ThreadPoolExecutor(jobs)
        try:
            print(f"baseline: the tests of {len(mutants)} mutants, without a mutant", flush=True)
            base = pool.submit(runner.baseline, mutants).result()
            print(f"baseline: {base.outcome} in {base.seconds:.0f} s {base.test}", flush=True)
            if base.outcome != "passed":
                print(base.output[-4000:])
                return None
            futures: dict[Future[Run], Mutant] = {pool.submit(runner.check, m, limit_s): m for m in mutants}
            for i, future in enumerate(as_completed(futures), 1):
                mutant, run = futures[future], future.result()
                row = rows[mutant.name] = record(mutant, run)
                line = f"[{i}/{len(mutants)}] {row['outcome']:8} {run.seconds:5.1f} s  {mutant.name}"
                print(f"{line}  {run.test} {run.error}", flush=True)
                if row["outcome"] == "error":
                    print(run.output[-2000:])
        finally:
            runner.stop()
            pool.shutdown(wait=True, cancel_futures=True)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    outcomes = [rows[mutant.name]["outcome"] for mutant in mutants]
    totals: dict[str, Any] = {name: outcomes.count(name) for name in ("caught", "timeout", "survived", "error")}
    return {
        "what": "mutants, and the first of their tests that fails; a timeout counts as caught",
        "commit": _commit(),
        "totals": {"mutants": len(mutants)} | totals | {"cpu_s": round(used.ru_utime + used.ru_stime)},
        "baseline_s": round(base.seconds, 1),
        "mutants": [rows[mutant.name] for mutant in mutants],
    }


def _commit() -> str:
    """Return the last commit that changed the mutated packages, with a mark if they hold other changes."""
    code = ("--", "gkd", "teacher_server")
    with contextlib.suppress(OSError):
        commit, changes = (
            subprocess.run(["git", *command, *code], cwd=ROOT, capture_output=True, text=True, check=False).stdout
            for command in (("log", "-1", "--format=%h"), ("status", "--porcelain"))
        )
        return commit.strip() + ("-dirty" if changes else "")
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--only", metavar="NAME", action="append", help="run this mutant alone; may be repeated")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the results to this file")
    parser.add_argument("--jobs", metavar="N", type=int, default=1, help="mutants at a time (default: 1)")
    parser.add_argument("--limit", metavar="S", type=float, default=180.0, help="seconds a mutant may take (180)")
    parser.add_argument("--list", action="store_true", help="list names, files and tests, and run nothing")
    arguments = parser.parse_args()
    if unknown := set(arguments.only or ()) - {mutant.name for mutant in MUTANTS}:
        parser.error(f"--only {', '.join(sorted(unknown))}: no such mutant; see --list")
    if arguments.jobs < 1:
        parser.error(f"--jobs {arguments.jobs}: use 1 or more")
    mutants = [mutant for mutant in MUTANTS if not arguments.only or mutant.name in arguments.only]
    if found := problems(mutants, ROOT):
        print("\n".join(found), file=sys.stderr)
        return 2
    if arguments.list:
        for mutant in mutants:
            print(f"{mutant.name:40} {mutant.locate(ROOT)}  {' '.join(mutant.test_ids(ROOT))}")
        return 0
    signal.signal(signal.SIGINT, signal.default_int_handler)  # also where a shell's `&` had it ignored
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        results = run_all(mutants, arguments.jobs, arguments.limit)
    except KeyboardInterrupt:
        print("interrupted; all test processes were ended", file=sys.stderr)
        return 130
    if results is None:
        return 2
    if arguments.json:
        write_results(arguments.json, results)
    print(", ".join(f"{name} {value}" for name, value in results["totals"].items()))
    return 1 if results["totals"]["survived"] or results["totals"]["error"] else 0


if __name__ == "__main__":
    sys.exit(main())
