"""Run a command or test files on stand-in cards. run.sh calls it with the Python of the GPU environment."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

from tests.dry_card.environment import HERE, ROOT, environment, gpu_python, remove_segments

SELF_TEST = os.path.relpath(ROOT / "tests/unit/test_dry_card.py")


def run(command: list[str], cards: int, gib: float) -> int:
    """Run a command on a new machine, pass SIGTERM on to it, remove its shared memory, and return its exit code."""
    env = environment(cards, gib, os.environ.get("DRY_CARD_MACHINE"), os.environ.get("DRY_CARD_VALUES", "1") == "1")
    process = subprocess.Popen(command, env=env)
    signal.signal(signal.SIGINT, lambda *_: None)  # The terminal sends it to the command, too.
    signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    try:
        code = process.wait()
        return code if code >= 0 else 128 - code
    finally:
        remove_segments(env)


def run_tests(tests: list[str], options: list[str], cards: int, gib: float) -> int:
    """Run each file in a process and on a machine of its own, print a table, and return the first bad exit code."""
    table, worst = [f"{'file':<60}{'passed':>7}{'failed':>7}{'skipped':>8}{'seconds':>8}"], 0
    for test in tests:
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "report.xml"
            command = [str(gpu_python()), "-m", "pytest", "-q", "--device", "cuda", f"--junitxml={report}"]
            code = run([*command, *options, test], cards, gib)
            suite = next(ElementTree.parse(report).iter("testsuite")).attrib if report.exists() else None
        worst = worst or (0 if code == 5 else code)  # 5: the options left no test.
        if suite is None:
            table.append(f"{test:<60} ended with code {code}")
            continue
        n, failed, errors, skipped = (int(suite[name]) for name in ("tests", "failures", "errors", "skipped"))
        passed, bad = n - failed - errors - skipped, failed + errors
        table.append(f"{test:<60}{passed:>7}{bad:>7}{skipped:>8}{float(suite['time']):>8.0f}")
    print("\n" + "\n".join(table))
    return worst


def main() -> int:
    arguments, command = sys.argv[1:], list[str]()
    if "--" in arguments:
        at = arguments.index("--")
        arguments, command = arguments[:at], arguments[at + 1 :]
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("--cards", type=int, default=int(os.environ.get("DRY_CARD_COUNT", 1 if command else 2)))
    parser.add_argument("--gib", type=float, default=float(os.environ.get("DRY_CARD_GIB", 8)))
    options, rest = parser.parse_known_args(arguments)
    if options.help:
        print((HERE / "README.md").read_text())
        return 0
    if command:
        return run(command, options.cards, options.gib)
    tests = [a for a in rest if Path(a.partition("::")[0]).exists()]
    return run_tests(tests or [SELF_TEST], [a for a in rest if a not in tests], options.cards, options.gib)


if __name__ == "__main__":
    raise SystemExit(main())
