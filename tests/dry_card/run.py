"""Run a command, or tests, on stand-in cards; run.sh calls it with the GPU environment's Python."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

from tests.dry_card.environment import ROOT, environment, gpu_python, remove_segments

HELP = (ROOT / "tests/dry_card/README.md").read_text() if (ROOT / "tests/dry_card/README.md").exists() else __doc__


def run(command: list[str], options: argparse.Namespace) -> int:
    """Run a command on a new machine and return its exit code. Signals reach it; its shared memory is removed."""
    settings = {"cards": options.cards, "gib": options.gib, "values": options.values}
    env = environment(machine=os.environ.get("DRY_CARD_MACHINE"), **settings)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to the command, too
    process = subprocess.Popen(command, env=env, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler))
    signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    try:
        code = process.wait()
        return code if code >= 0 else 128 - code
    finally:
        remove_segments(env)


def run_tests(arguments: list[str], options: argparse.Namespace) -> int:
    """Run each test file in a process and on a machine of its own, print a table, and return 1 if something failed."""
    files = [a for a in arguments if Path(a.partition("::")[0]).exists()]
    rest = [a for a in arguments if a not in files]
    rows, worst = [], 0
    for file in files:
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "report.xml"
            flags = ["--device", "cuda", "-q", f"--junitxml={report}"]
            code = run([str(gpu_python()), "-m", "pytest", *flags, *rest, file], options)
            suite = next(ElementTree.parse(report).iter("testsuite")) if report.exists() else None
        worst = worst or (code if code != 5 else 0)  # 5: no test was selected
        if suite is None:
            rows.append((file, "", f"exit {code}", "", ""))
            continue
        total, failed, errors, skipped = (int(suite.get(k, 0)) for k in ("tests", "failures", "errors", "skipped"))
        seconds = f"{float(suite.get('time', 0)):.0f}"
        rows.append((file, str(total - failed - errors - skipped), str(failed + errors), str(skipped), seconds))
    print(f"\n{'file':<52}{'passed':>8}{'failed':>8}{'skipped':>9}{'seconds':>9}")
    for row in rows:
        print(f"{row[0]:<52}{row[1]:>8}{row[2]:>8}{row[3]:>9}{row[4]:>9}")
    return worst


def main() -> int:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--help", action="store_true")
    parser.add_argument("--cards", type=int, default=int(os.environ.get("DRY_CARD_COUNT", 0)))
    parser.add_argument("--gib", type=float, default=float(os.environ.get("DRY_CARD_GIB", 8)))
    parser.set_defaults(values=os.environ.get("DRY_CARD_VALUES", "1") == "1")
    arguments = sys.argv[1:]
    at = arguments.index("--") if "--" in arguments else len(arguments)
    options, tests = parser.parse_known_args(arguments[:at])
    command = arguments[at + 1 :]
    if options.help:
        print(HELP)
        return 0
    options.cards = options.cards or (1 if command else 2)
    if command:
        return run(command, options)
    if tests:
        return run_tests(tests, options)
    return run([str(gpu_python()), "-m", "tests.dry_card.selftest"], options)


if __name__ == "__main__":
    raise SystemExit(main())
