"""Measure distill.support: the gradients of the three lists against the whole vocabulary, and what the ids cost.

    python -m tests.bench.bench_support --models DIR [--only errors,speed] [--json FILE] [--rounds N] [--seeds N]

`--models`: models of the quickstart (`python -m examples.quickstart.make_models`), the student before its training.
Two minutes for the errors, two for the speed, which needs an idle machine (`cpu_of_others` in the JSON).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.bench.command import parsed, parser, run_parts
from tests.bench.teacher_report import Part

PARTS = ("errors", "speed")
KS = (4, 8, 16)  # the quickstart's teacher.topk is 16


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 1 if a figure missed its goal."""
    made = parser("tests.bench.bench_support", __doc__ or "", PARTS, rounds=7)
    made.add_argument("--models", type=Path, required=True, metavar="DIR", help="models of the quickstart")
    made.add_argument("--prompts", type=int, default=128, metavar="N", help="of the errors; default: %(default)s")
    made.add_argument("--seeds", type=int, default=3, metavar="N", help="of the errors; default: %(default)s")
    args = parsed(made, PARTS, argv)
    os.environ["OMP_NUM_THREADS"] = "1"  # read by torch, which the parts import

    def measure(name: str) -> Part:
        if name == "errors":
            from tests.bench.support_errors import errors

            return errors(args.models, KS, args.prompts, args.seeds)
        from tests.bench.support_speed import speed

        return speed(args.models, args.rounds)

    return run_parts(args, measure)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
