"""Compare the speed of another checkout with this one: the same commands in turn, in one session.

    git worktree add CHECKOUT COMMIT
    python -m tests.bench.bench_before --before CHECKOUT [--trl DIR] [--only PART,..] [--rounds N] [--json FILE]

Each command is the checkout's own, run with this environment's packages. A figure is the median over the rounds of
seconds after / seconds before. TRL's folder: see tests/bench/bench_trl.py. About 50 minutes on two idle cores. Rows of
TRL, of memcpy and of common implementations are the same program in both: their ratio is noise.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from tests.bench.command import ROOT, parsed, parser, run_parts
from tests.bench.teacher_report import Figure, Part, Table

_LIMIT_S = 3600.0
_MOST = 1.1  # goal of every row of ours
# Same program in both checkouts.
_CONTROLS = ("TRL", "memcpy", "tensor by tensor", "dense", "usual", "as TRL", "floor", "bare echo")
Seconds = dict[str, float]


def _run(checkout: Path, *words: str, result: Path) -> float:
    """Run `python -m WORDS` in the checkout, and return its seconds.

    A benchmark that missed a goal of its own ends with 1, as one that failed does; only the first writes `result`.

    Raises:
        RuntimeError: it failed; with its last lines.
    """
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", *words],
        cwd=checkout, env=os.environ | {"PYTHONPATH": str(checkout)}, timeout=_LIMIT_S,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    if done.returncode not in (0, 1) or not result.exists():
        raise RuntimeError(f"{checkout}: {words[0]} ended with {done.returncode}:\n{done.stdout[-3000:]}")
    return time.monotonic() - began


def _bench(checkout: Path, *words: str) -> dict[str, Any]:
    """Return the parts of the JSON file that a benchmark writes."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "out.json")
        _run(checkout, *words, "--json", str(file), result=file)
        parts: dict[str, Any] = json.loads(file.read_text())["parts"]
        return parts


def quickstart(checkout: Path) -> Seconds:
    package = "examples.quickstart" if (checkout / "examples/quickstart").exists() else "gkd.quickstart"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "out.json")
        wall_s = _run(checkout, package, "--results", str(file), result=file)
        return {"whole command": wall_s, "120 training steps": json.loads(file.read_text())["training_s"]}


def weight_sync(checkout: Path) -> Seconds:
    parts = _bench(checkout, "tests.bench.bench_weight_sync", "--only", "qwen25_05b")
    return {str(way): float(seconds) for way, seconds, *_ in parts["qwen25_05b"]["tables"][0]["rows"]}


def loss(checkout: Path) -> Seconds:
    parts = _bench(checkout, "tests.bench.bench_loss", "--only", "topk_32000,topk_151936,jsd_32000")
    return {
        f"{name}: {variant}": float(seconds)
        for name, part in parts.items()
        for variant, seconds, *_ in part["tables"][0]["rows"]
    }


def trl(checkout: Path, folder: str) -> Seconds:
    """Return seconds for 1,000 sequences."""
    parts = _bench(checkout, "tests.bench.bench_trl", "--trl", folder, "--only", "long_tail,short")
    rates: dict[str, list[float]] = {}
    for name, part in parts.items():
        for program, rate, *_ in part["tables"][0]["rows"]:
            rates.setdefault(f"{name}: {program}", []).append(rate)
    return {name: 1000 / median(values) for name, values in rates.items()}


def teacher(checkout: Path) -> Seconds:
    """Return seconds for 1,000 requests of eight clients."""
    rows = _bench(checkout, "tests.bench.bench_teacher", "--only", "load")["load"]["tables"][0]["rows"]
    return {str(target): 1000 / float(per_s) for target, per_s, *_ in rows}


def compare(name: str, before: Path, rounds: int, measure: Callable[[Path], Seconds]) -> Part:
    """Measure both checkouts in turn, `rounds` times."""
    found: list[Mapping[str, Sequence[float]]] = []
    for turn in range(rounds):
        sides = {checkout: measure(checkout) for checkout in ((before, ROOT) if turn % 2 == 0 else (ROOT, before))}
        found.append({row: (old, sides[ROOT][row]) for row, old in sides[before].items() if row in sides[ROOT]})
        print(f"  round {turn + 1} of {rounds}", file=sys.stderr, flush=True)
    rows = []
    for row in found[0]:
        old, new = (median(each[row][side] for each in found) for side in (0, 1))
        rows.append(
            (row, round(old, 4), round(new, 4), round(median(each[row][1] / each[row][0] for each in found), 3))
        )
    figures = [
        Figure(f"{row}: after / before", ratio, at_most=None if any(word in row for word in _CONTROLS) else _MOST)
        for row, _, _, ratio in rows
    ]
    title = {"trl": "seconds for 1,000 sequences", "teacher": "seconds for 1,000 requests"}.get(name, "seconds")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=before, capture_output=True, text=True)
    settings = {"rounds": rounds, "before": commit.stdout.strip()}
    return Part(
        name,
        f"{name} of two checkouts, in turn",
        figures,
        [Table(title, ("", "before", "after", "ratio"), rows)],
        settings,
    )


def main(argv: Sequence[str] | None = None) -> int:
    measures: dict[str, Callable[[Path], Seconds]] = {
        "quickstart": quickstart,
        "weight_sync": weight_sync,
        "loss": loss,
        "teacher": teacher,
        "trl": lambda checkout: trl(checkout, str(args.trl)),
    }
    made = parser("tests.bench.bench_before", __doc__ or "", measures, rounds=2)
    made.add_argument("--before", type=Path, required=True, metavar="CHECKOUT", help="the checkout to compare with")
    made.add_argument("--trl", type=Path, metavar="DIR", help="folder with TRL, for the part trl")
    args = parsed(made, measures, argv)
    if "trl" in args.only.split(",") and args.trl is None:
        made.error("--only trl needs --trl DIR")
    before = args.before.resolve()
    if "quickstart" in args.only.split(","):
        for checkout in (before, ROOT):  # the first run makes the models, and fills caches
            quickstart(checkout)
    return run_parts(args, lambda name: compare(name, before, args.rounds, measures[name]))


if __name__ == "__main__":
    sys.exit(main())
