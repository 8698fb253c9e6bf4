"""Compare the peak of torch's CUDA allocator in training steps with `gkd.memory.footprint`'s prediction, item by item.

On stand-in cards, without a GPU, and on a GPU:

    DRY_CARD_VALUES=0 bash tests/dry_card/run.sh --cards 1 --gib 79 -- .venv-gpu/bin/python \\
        -m tests.bench.footprint_allocator --json docs/results/footprint_cuda_allocator.json
    python -m tests.bench.footprint_allocator

Stand-in cards execute torch's real allocator, compilers and host code; kernels do nothing, and no number is of a GPU.
Bytes do not depend on values. Each case is a process of its own, a minute on an idle core.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from tests.bench import command
from tests.bench.bench_footprint import off_by
from tests.bench.command import parsed, parser, run_parts
from tests.bench.footprint_peak import LOSS, PASSING, SAVED, SIZES, STATES, WORKSPACES, PeakCase, PeakFound, measure
from tests.bench.teacher_report import Part, Table, machine

ON_STAND_IN = "DRY_CARD_VALUES" in os.environ
_SMALL = {"n_layers": 2, "n_vocab": 4096}  # recomputed, the backward pass of a layer is the peak, and not the loss
CASES: dict[str, tuple[PeakCase, ...]] = {
    "megatron": (
        PeakCase("512 tokens", n_tokens=512),
        PeakCase("4096 tokens"),
        PeakCase("12 layers", n_layers=12),
        PeakCase("untied, 8192 tokens, recompute full", n_tokens=8192, tied=False, recompute="full"),
        PeakCase("8192 tokens, recompute selective", n_tokens=8192, n_layers=2, recompute="selective"),
        PeakCase("float32", n_layers=2, dtype="float32"),
        PeakCase("small vocabulary, recompute full", n_tokens=8192, recompute="full", **_SMALL),
        PeakCase("small vocabulary", n_tokens=8192, **_SMALL),
    ),
    "fsdp2": (
        PeakCase("512 tokens", "fsdp2", n_tokens=512, n_batches=2),
        PeakCase("4096 tokens", "fsdp2", n_batches=2),
        PeakCase("untied, 8192 tokens, recompute full", "fsdp2", 8192, tied=False, recompute="full", n_batches=2),
        PeakCase("float32", "fsdp2", n_layers=2, dtype="float32", n_batches=2),
        PeakCase("512 tokens, host memory", "fsdp2", n_tokens=512, cpu_offload=True, n_batches=2),
        PeakCase("4096 tokens, one micro-batch", "fsdp2"),
    ),
}
_ITEMS = (STATES, SAVED, LOSS, PASSING, WORKSPACES)


def compare(name: str) -> Part:
    """Measure all cases of a part."""
    figures, rows = [], []
    for case in CASES[name]:
        found = measure(case)
        ratio = found.predicted_peak / found.peak
        print(f"  {case.name}: {ratio:.3f}", file=sys.stderr, flush=True)
        figures.append(off_by(case.name, ratio))
        rows.append(_row(case, found))
    where = "stand-in cards without a GPU, whose kernels do nothing" if ON_STAND_IN else "a GPU"
    what = (
        f"Two training steps of a student of one rank, in torch's CUDA allocator on {where}; bytes, items at the peak."
    )
    columns = ("case", *_ITEMS, "peak", "predicted", "predicted / measured")
    return Part(name, what, figures, [Table("", columns, rows)], SIZES)


def _row(case: PeakCase, found: PeakFound) -> tuple[str | float, ...]:
    items = (found.items.get(item, 0) for item in _ITEMS)
    return (case.name, *items, found.peak, found.predicted_peak, round(found.predicted_peak / found.peak, 3))


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 1 if a figure missed its goal."""
    made = parser("tests.bench.footprint_allocator", __doc__ or "", CASES, rounds=1)
    if ON_STAND_IN:  # their nvidia-smi names a card
        command.machine = lambda: machine() | {"gpus": []}
    return run_parts(parsed(made, CASES, argv), compare)


if __name__ == "__main__":
    sys.exit(main())
