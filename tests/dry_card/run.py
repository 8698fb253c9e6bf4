"""Run a command or tests on stand-in cards. run.sh calls it with the Python of the GPU environment."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys

from tests.dry_card.environment import HERE, environment, gpu_python, remove_segments


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


def main() -> int:
    at = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    arguments, command = sys.argv[1:at], sys.argv[at + 1 :]
    if {"-h", "--help"} & {*arguments}:
        print((HERE / "README.md").read_text())
        return 0
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--cards", type=int, default=int(os.environ.get("DRY_CARD_COUNT", 1 if command else 2)))
    parser.add_argument("--gib", type=float, default=float(os.environ.get("DRY_CARD_GIB", 8)))
    options, tests = parser.parse_known_args(arguments)
    tests = tests or ["tests/unit/test_dry_card.py"]
    command = command or [str(gpu_python()), "-m", "tests.by_file", "--device", "cuda", *tests]
    return run(command, options.cards, options.gib)


if __name__ == "__main__":
    raise SystemExit(main())
