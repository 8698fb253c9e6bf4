"""Select the parts of a benchmark and write its results. Shared by all benchmark commands."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.bench.teacher_report import Observer, Part, as_json, as_text, machine, merge_json

ROOT = Path(__file__).resolve().parents[2]


def parser(prog: str, description: str, parts: Collection[str], rounds: int = 0) -> argparse.ArgumentParser:
    """--only, --json, and --rounds unless there is no default of them."""
    made = argparse.ArgumentParser(prog=f"python -m {prog}", description=description.splitlines()[0])
    made.add_argument("--only", default=",".join(parts), metavar="PART,..", help="default: %(default)s")
    made.add_argument("--json", type=Path, metavar="FILE", help="put the parts that ran into this file")
    if rounds:
        made.add_argument("--rounds", type=int, default=rounds, metavar="N", help="default: %(default)s")
    return made


def add_device(made: argparse.ArgumentParser, default: str) -> None:
    """--device and --tiny."""
    made.add_argument("--device", choices=("cuda", "cpu"), default=default, help="default: %(default)s")
    made.add_argument("--tiny", action="store_true", help="the sizes of a CPU on cuda, too: a rehearsal without times")


def parsed(made: argparse.ArgumentParser, parts: Collection[str], argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse. Exits with a usage error for a part that does not exist or no rounds."""
    args = made.parse_args(argv)
    if unknown := [name for name in args.only.split(",") if name not in parts]:
        made.error(f"--only {args.only}: no part {unknown[0]!r}; there are {', '.join(parts)}")
    if getattr(args, "rounds", 1) < 1:
        made.error(f"--rounds {args.rounds}: at least one round")
    if getattr(args, "device", "cpu") == "cuda":
        import torch  # only here, so that children that import this file stay light

        if not torch.cuda.is_available():
            made.error("--device cuda: torch sees no CUDA device")
    elif made.get_default("device") == "cuda":  # the other benchmarks have their own sizes for a CPU
        args.tiny = True
    return args


def in_fresh_process(module: str, case: Mapping[str, Any], *, threads: int, timeout_s: float) -> dict[str, Any]:
    """`python -m MODULE CASE`, and the JSON object of its last line.

    Raises:
        subprocess.CalledProcessError, subprocess.TimeoutExpired: it failed, or took longer.
    """
    environment = os.environ | {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "PYTHONWARNINGS": "ignore",
    }
    done = subprocess.run(
        [sys.executable, "-m", module, json.dumps(case)],
        env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=timeout_s, check=True,
    )  # fmt: skip
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def call(*words: str, log: Path, timeout_s: float = 1800.0, check: bool = True) -> int:
    """Run `python -m WORDS`, write what it prints into a file, and return its exit code.

    Raises:
        subprocess.CalledProcessError, subprocess.TimeoutExpired: it failed (with `check`), or took longer.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        command = [sys.executable, "-m", *words]
        done = subprocess.run(
            command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, timeout=timeout_s, check=check
        )
    return done.returncode


def check_same_loss(losses: Mapping[str, float]) -> None:
    """Raise RuntimeError if variants, which should compute the same, have different losses."""
    expected = next(iter(losses.values()))
    for name, loss in losses.items():
        if abs(loss - expected) > 1e-4 * abs(expected):
            raise RuntimeError(f"{name} has the loss {loss}, others {expected}: they do not compute the same")


def run_parts(args: argparse.Namespace, measure: Callable[[str], Part], *, levels: int = 6) -> int:
    """Measures, prints and keeps each part that was asked for. Exit code: 1 if a figure missed its goal.

    Args:
        levels: of the JSON file that are opened, see `tests.results`; 2 writes a line for each part.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    where, missed = machine(), 0
    for name in args.only.split(","):
        print(f"measuring {name} ...", file=sys.stderr, flush=True)
        observer = Observer()
        part = measure(name)
        result = as_json(part, where, observer.stop())
        missed += sum(figure.met is False for figure in part.figures)
        print(f"{as_text(part)}\n", flush=True)
        if args.json is not None:
            merge_json(args.json, {part.name: result}, levels=levels)
    return 1 if missed else 0
