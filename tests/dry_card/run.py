"""Run a command or test files on stand-in cards. run.sh calls it with the Python of the GPU environment."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from tests.dry_card.environment import HERE, ROOT, environment, gpu_python, remove_segments

SELF_TEST = os.path.relpath(ROOT / "tests/unit/test_dry_card.py")
COLUMNS = ("passed", "failed", "skipped", "seconds")


def run(command: list[str], cards: int, gib: float) -> int:
    """Run a command on a new machine, pass SIGTERM on to it, remove its shared memory, and return its exit code."""
    env = environment(cards, gib)
    process = subprocess.Popen(command, env=env)
    signal.signal(signal.SIGINT, lambda *_: None)  # The terminal sends it to the command, too.
    signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    try:
        code = process.wait()
        return code if code >= 0 else 128 - code
    finally:
        remove_segments(env)


def judged(report: Path, code: int) -> dict[str, Any]:
    """Return the counts and seconds of a report of pytest, and how often each reason to skip a test."""
    if not report.exists():
        return {"failed": f"code {code}"}
    suite = next(ElementTree.parse(report).iter("testsuite"))
    n, failed, errors, skipped = (int(suite.attrib[name]) for name in ("tests", "failures", "errors", "skipped"))
    counts = n - failed - errors - skipped, failed + errors, skipped, round(float(suite.attrib["time"]))
    reasons = Counter(test.attrib["message"] for test in suite.iter("skipped"))
    return dict(zip(COLUMNS, counts, strict=True)) | ({"reasons": dict(reasons)} if reasons else {})


def run_tests(tests: list[str], options: list[str], cards: int, gib: float, to: Path | None) -> int:
    """Run each file in a process and on a machine of its own, print a table, and return the first bad exit code.

    Args:
        to: JSON file for the rows of the table, which keeps its rows of other files.
    """
    rows, worst = dict[str, dict[str, Any]](), 0
    for test in tests:
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "report.xml"
            command = [str(gpu_python()), "-m", "pytest", "-q", "--device", "cuda", f"--junitxml={report}"]
            code = run([*command, *options, test], cards, gib)
            rows[test] = judged(report, code)
        worst = worst or (0 if code == 5 else code)  # 5: the options left no test.
        if to is not None:
            kept = json.loads(to.read_text())["files"] if to.exists() else {}
            versions = {name: version(name) for name in ("torch", "vllm", "megatron-core", "ray")}
            result = {"versions": versions, "files": dict(sorted((kept | rows).items()))}
            to.write_text(json.dumps(result, indent=1) + "\n")
    print()
    for name, row in [("file", dict(zip(COLUMNS, COLUMNS, strict=True))), *rows.items()]:
        print(f"{name:<60}" + "".join(f"{row.get(column, ''):>9}" for column in COLUMNS))
    return worst


def main() -> int:
    at = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    arguments, command = sys.argv[1:at], sys.argv[at + 1 :]
    if {"-h", "--help"} & {*arguments}:
        print((HERE / "README.md").read_text())
        return 0
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--cards", type=int, default=int(os.environ.get("DRY_CARD_COUNT", 1 if command else 2)))
    parser.add_argument("--gib", type=float, default=float(os.environ.get("DRY_CARD_GIB", 8)))
    parser.add_argument("--json", type=Path)
    options, rest = parser.parse_known_args(arguments)
    if command:
        return run(command, options.cards, options.gib)
    named = [Path(a) for a in rest if Path(a.partition("::")[0]).exists()]
    tests = [str(file) for path in named for file in (sorted(path.rglob("test_*.py")) if path.is_dir() else [path])]
    more = [a for a in rest if Path(a) not in named]
    return run_tests(tests or [SELF_TEST], more, options.cards, options.gib, options.json)


if __name__ == "__main__":
    raise SystemExit(main())
