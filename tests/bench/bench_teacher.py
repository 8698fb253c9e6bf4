"""Measure the overhead of the teacher server relative to a bare engine, a bare socket and a bare proxy.

    python -m tests.bench.bench_teacher [--only transport,load] [--json FILE] [--markdown FILE] [--quick]

Every figure compares two things that are measured in turns in the same run. The files hold all
parts; a run replaces those it measured. About twelve minutes on two cores, 3 GB of memory; give it
an idle machine, and see `cpu_of_others` in the JSON for how idle it was.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.bench.teacher_report import Observer, Part, as_json, as_markdown, as_text, machine, merge_json


def _engines(quick: bool, device: str = "cpu") -> Part:
    from tests.bench.teacher_engines import engines

    return engines(rounds=1 if quick else 3, seconds=4.0 if quick else 20.0, device=device)


def _transport(quick: bool) -> Part:
    from tests.bench.teacher_transport import transport

    return transport(rounds=3 if quick else 15)


def _load(quick: bool) -> Part:
    from tests.bench.teacher_load import load

    return load(rounds=1 if quick else 5, seconds=2.0 if quick else 5.0)


def _exactness(quick: bool) -> Part:
    from tests.bench.teacher_exactness import exactness

    return exactness(n_sequences=8 if quick else 48)


# Imported only when asked for, so that the spawned children, which import this file, stay light.
PARTS: dict[str, Callable[[bool], Part]] = {
    "engines": _engines,
    "transport": _transport,
    "load": _load,
    "exactness": _exactness,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 1 if a figure missed its goal."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.bench_teacher", description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(PARTS), metavar="PART,..", help="default: %(default)s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="put the parts that ran into this file")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="tables of all that is in the JSON file")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of the part engines; default: cpu")
    parser.add_argument("--quick", action="store_true", help="a minute or two, to see that it runs; noisy")
    args = parser.parse_args(argv)
    names = args.only.split(",")
    if unknown := [name for name in names if name not in PARTS]:
        parser.error(f"--only {args.only}: no part {unknown[0]!r}; there are {', '.join(PARTS)}")
    if args.device == "cuda" and names != ["engines"]:
        parser.error("--device cuda: only the part engines computes on a GPU; give --only engines, too")
    if args.markdown is not None and args.json is None:
        parser.error("--markdown shows what is in the JSON file: give --json, too")
    for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[variable] = "1"  # for this process and its children, which read it when they import numpy or torch
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # children end with their contexts
    where, results, missed = machine(), {}, 0
    for name in names:
        print(f"measuring {name} ...", file=sys.stderr, flush=True)
        observer = Observer()
        part = _engines(args.quick, args.device) if name == "engines" else PARTS[name](args.quick)
        results[name] = as_json(part, where, observer.stop())
        missed += sum(figure.met is False for figure in part.figures)
        print(f"{as_text(part)}\n", flush=True)
        if args.json is not None:
            _write(args, {name: results[name]})
    return 1 if missed else 0


def _write(args: argparse.Namespace, parts: dict[str, Any]) -> None:
    merged = merge_json(args.json, parts)
    if args.markdown is not None:
        ordered = {name: merged[name] for name in PARTS if name in merged}
        args.markdown.parent.mkdir(parents=True, exist_ok=True)
        args.markdown.write_text(as_markdown(ordered))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
