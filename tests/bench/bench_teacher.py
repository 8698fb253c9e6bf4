"""Measure the teacher server: speed next to a bare engine and a bare proxy, and exactness of what a client gets.

    python -m tests.bench.bench_teacher [--only engines,load,exactness] [--json FILE] [--quick]

Ratios are of two things that are measured in turns in the same run. The file holds all parts; a run replaces those it
measured. About ten minutes on two cores, 3 GB of memory; give it an idle machine, and see `cpu_of_others` in the JSON
for how idle it was.
"""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence

from tests.bench.command import add_device, parsed, parser, run_parts
from tests.bench.teacher_report import Part


def _engines(args: Namespace) -> Part:
    from tests.bench.teacher_engines import engines

    return engines(1 if args.quick else 3, 4.0 if args.quick else 20.0, args.device, tiny=args.tiny)


def _load(args: Namespace) -> Part:
    from tests.bench.teacher_load import load

    return load(rounds=1 if args.quick else 5, seconds=2.0 if args.quick else 5.0)


def _exactness(args: Namespace) -> Part:
    from tests.bench.teacher_exactness import exactness

    return exactness(n_sequences=8 if args.quick else 48)


# Imported only when asked for, so that the spawned children, which import this file, stay light.
PARTS: dict[str, Callable[[Namespace], Part]] = {"engines": _engines, "load": _load, "exactness": _exactness}


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 1 if a figure missed its goal."""
    made = parser("tests.bench.bench_teacher", __doc__ or "", PARTS)
    made.add_argument("--quick", action="store_true", help="a minute or two, to see that it runs; noisy")
    add_device(made, "cpu")
    args = parsed(made, PARTS, argv)
    if args.device == "cuda" and args.only != "engines":
        made.error("--device cuda: only the part engines computes on a GPU; give --only engines, too")
    for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[variable] = "1"  # for this process and its children, which read it when they import numpy or torch
    return run_parts(args, lambda name: PARTS[name](args))


if __name__ == "__main__":
    sys.exit(main())
