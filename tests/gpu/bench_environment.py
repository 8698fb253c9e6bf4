"""Check what the other stages need of a machine: the preflight's findings, and free GPU memory.

python -m tests.gpu.bench_environment [--json FILE] [--device cuda|cpu]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

from gkd.preflight.machine import build_problems, driver_problems, toolchain_problems
from tests.bench.command import add_device, parsed, parser, run_parts
from tests.bench.teacher_report import Figure, Part


def measure(device: str, *, tiny: bool) -> Part:
    cuda = torch.version.cuda
    problems = [str(problem) for problem in toolchain_problems()]
    figures: list[Figure] = []
    if device == "cuda":
        problems = [*map(str, driver_problems(cuda or "0")), *map(str, build_problems()), *problems]
        note = "another process on the card?"
        figures = [
            Figure("GPUs that torch sees", float(torch.cuda.device_count()), at_least=1.0),
            Figure("free share of the GPUs' memory", _free_share(), at_least=None if tiny else 0.95, note=note),
        ]
    figures.insert(0, Figure("problems of the machine", float(len(problems)), at_most=0.0, note="; ".join(problems)))
    what = f"This machine; torch {torch.__version__}, CUDA {cuda}, NCCL {_nccl()}."
    return Part("environment", what, figures, (), {"device": device})


def _free_share() -> float:
    """Return the smallest one. The CUDA context of this process counts as used."""
    free = [torch.cuda.mem_get_info(i) for i in range(torch.cuda.device_count())]
    return min(available / total for available, total in free)


def _nccl() -> str:
    return ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else "not used"


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 1 if a figure missed its goal."""
    made = parser("tests.gpu.bench_environment", __doc__ or "", ("environment",), rounds=1)
    add_device(made, "cuda")
    args = parsed(made, ("environment",), argv)
    return run_parts(args, lambda _: measure(args.device, tiny=args.tiny))


if __name__ == "__main__":
    sys.exit(main())
