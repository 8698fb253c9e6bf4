"""Count what the host launches in a training step of a 1.5B student's layers, on a stand-in card.

    DRY_CARD_VALUES=0 bash tests/dry_card/run.sh -- .venv-gpu/bin/python -m tests.gpu.bench_launches
        [--only fsdp2,fsdp2_plain,megatron,megatron_plain] [--layers 28] [--json FILE] [--ops]

The numbers of layers and tensors decide it, not their sizes: the model has the 1.5B shape's layers of
`tests.gpu.bench_student_cuda` with few columns, in bfloat16, one pack of 8 sequences. Kernels compute nothing on the
card (`tests/dry_card/README.md`), so losses mean nothing. Also the seconds of the start with what is compiled: cold in
an empty cache, and warm in a second process with the same one. --ops: the operations of torch that were called most.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from gkd.data.batching import make_micro_batches
from tests.bench.command import in_fresh_process, parsed, parser, run_parts
from tests.bench.student_case import MIXES, make_student, only_rank, save_model, sequences
from tests.bench.teacher_report import Figure, Part
from tests.dry_card.without_values import train_without_values

KINDS = ("kernels", "products", "copies", "fills")  # as in tests/dry_card/cards.h
GOALS = {"fsdp2": 1800, "megatron": 1500}
VARIANTS: dict[str, dict[str, Any]] = {
    "fsdp2": {"compiles": "on"},
    "fsdp2_plain": {"compiles": "off"},
    "megatron": {"layers": "auto"},
    "megatron_plain": {"layers": "torch"},
}
_SIZES = {
    "vocab_size": 4096, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "head_dim": 64,
    "num_key_value_heads": 2, "max_position_embeddings": 4096, "tie_word_embeddings": True,
}  # fmt: skip


def launched() -> tuple[int, ...]:
    """Return what this process has launched since it began, by `KINDS`."""
    count = ctypes.CDLL(None).dry_card_launches
    count.restype = ctypes.c_long
    return tuple(count(kind) for kind in range(len(KINDS)))


def run(variant: str, n_layers: int, ops: bool) -> dict[str, Any]:
    """Count the third step of a student; in a process of its own."""
    train_without_values()
    MIXES["one_pack"] = lambda rng: [(16, 48)] * 8
    rollouts, scores = sequences("one_pack", _SIZES["vocab_size"])
    batches = make_micro_batches(rollouts, scores, micro_batch_size=8, packed=True)
    with tempfile.TemporaryDirectory(prefix="gkd_bench_") as folder, only_rank("cuda"):
        model = Path(folder) / "model"
        save_model(model, dtype=torch.bfloat16, num_hidden_layers=n_layers, **_SIZES)
        start = time.perf_counter()
        student = make_student(
            variant.partition("_")[0], model, dtype=torch.bfloat16, device="cuda:0", **VARIANTS[variant]
        )
        student.optim = replace(student.optim, clip_grad=1e-9)  # clips any gradient
        step: Callable[[], Any] = lambda: student.train_step(batches)  # noqa: E731
        step()
        seconds = time.perf_counter() - start
        step()
        before = launched()
        step()
        counts = [after - earlier for after, earlier in zip(launched(), before, strict=True)]
        called: Counter[str] = Counter()
        if ops:
            with profile(activities=[ProfilerActivity.CPU]) as profiled:
                step()
            called.update(event.name for event in profiled.events() or ())
        assert student.skipped == 0, "steps without loss tokens leave out the optimizer"
    return {"counts": counts, "seconds": seconds, "ops": called.most_common(60)}


def measure(variant: str, args: argparse.Namespace) -> Part:
    with tempfile.TemporaryDirectory(prefix="gkd_cache_") as cache:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.environ["TRITON_CACHE_DIR"] = cache
        case = {"variant": variant, "n_layers": args.layers, "ops": args.ops}
        cold, warm = (in_fresh_process("tests.gpu.bench_launches", case, threads=1, timeout_s=900.0) for _ in range(2))
    for name, n in cold["ops"]:
        print(f"{n:7d} {name}")
    total = sum(cold["counts"])
    figures = [Figure(f"{variant}: launches of a step", total, at_most=GOALS.get(variant))]
    figures += [Figure(f"{variant}: {kind}", n) for kind, n in zip(KINDS, cold["counts"], strict=True)]
    if variant in GOALS:
        figures.append(Figure(f"{variant}: start and first step, empty cache", cold["seconds"], "s"))
        figures.append(Figure(f"{variant}: start and first step, filled cache", warm["seconds"], "s"))
    return Part(
        variant, f"{args.layers} layers, one pack of 8 sequences, bfloat16.", figures, [], {**VARIANTS[variant]}
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 1 if a figure missed its goal."""
    made = parser("tests.gpu.bench_launches", __doc__ or "", VARIANTS)
    made.add_argument("--layers", type=int, default=28)
    made.add_argument("--ops", action="store_true", help="print which operations of torch were called")
    args = parsed(made, VARIANTS, argv)
    return run_parts(args, lambda name: measure(name, args))


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1].startswith("{"):
        print(json.dumps(run(**json.loads(sys.argv[1]))))
    else:
        sys.exit(main())
