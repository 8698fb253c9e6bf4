"""Measure all-reduce, reduce-scatter and broadcast of two ranks against a plain copy between their devices.

    python -m tests.gpu.bench_collectives [--json FILE] [--device cuda|cpu] [--rounds 20]

cuda: NCCL between GPU 0 and 1, 1 GiB in bfloat16, and a peer copy from GPU 0 to GPU 1. cpu: gloo, 4 MiB, and memcpy;
the bytes go through sockets, so there is no goal. Bus bandwidth as in NCCL's tests: with two ranks, all-reduce and
broadcast transfer as many bytes each way as the message has, reduce-scatter half as many.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests.bench.command import add_device, parsed, parser, run_parts
from tests.bench.teacher_report import Figure, Part, Table
from tests.gpu.timing import median_ms

N_BYTES = {"cuda": 1 << 30, "cpu": 4 << 20}
GOAL = 0.6  # of the copy's bandwidth
TRANSFERRED = {"all_reduce": 1.0, "broadcast": 1.0, "reduce_scatter": 0.5}  # share of the message, each way


def _rank(rank: int, folder: str, device: str, rounds: int) -> None:
    """Measure on both ranks; rank 0 writes milliseconds by collective, and of the copy."""
    where = torch.device("cuda", rank) if device == "cuda" else torch.device("cpu")
    if device == "cuda":
        torch.cuda.set_device(where)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    message = torch.ones(N_BYTES[device] // 2, dtype=torch.bfloat16, device=where)
    half = torch.empty(message.numel() // 2, dtype=torch.bfloat16, device=where)
    actions: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: dist.all_reduce(message, op=dist.ReduceOp.MAX),
        "broadcast": lambda: dist.broadcast(message, 0),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(half, message, op=dist.ReduceOp.MAX),
    }
    found = {name: median_ms(action, rounds, device=device) for name, action in actions.items()}
    assert bool((message == 1).all()) and bool((half == 1).all())
    dist.barrier()
    if rank == 0:
        other = torch.empty_like(message, device=torch.device("cuda", 1) if device == "cuda" else where)
        found["copy"] = median_ms(lambda: other.copy_(message), rounds, device=device)
        torch.save(found, Path(folder) / "found.pt")
    dist.barrier()
    dist.destroy_process_group()


def measure(device: str, rounds: int) -> Part:
    with tempfile.TemporaryDirectory(prefix="gkd_bench_") as folder:
        mp.spawn(_rank, (folder, device, rounds), nprocs=2)  # type: ignore[attr-defined,no-untyped-call]
        found: dict[str, float] = torch.load(Path(folder) / "found.pt")
    rates = {name: TRANSFERRED.get(name, 1.0) * N_BYTES[device] / ms / 1e6 for name, ms in found.items()}
    figures = [
        Figure(
            f"{name}: bus bandwidth / copy", rates[name] / rates["copy"], at_least=GOAL if device == "cuda" else None
        )
        for name in TRANSFERRED
    ]
    figures += [Figure(f"{name}: bus bandwidth", rate, "GB/s") for name, rate in rates.items()]
    rows = [(name, ms, rates[name]) for name, ms in found.items()]
    what = f"Two ranks, {N_BYTES[device] >> 20} MiB in bfloat16; the copy goes one way."
    table = Table("medians", ("what", "ms", "GB/s"), rows)
    return Part("collectives", what, figures, [table], {"device": device, "rounds": rounds})


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 1 if a figure missed its goal."""
    made = parser("tests.gpu.bench_collectives", __doc__ or "", ("collectives",), rounds=20)
    add_device(made, "cuda")
    args = parsed(made, ("collectives",), argv)
    if args.device == "cuda" and torch.cuda.device_count() < 2:
        made.error("--device cuda: two GPUs are needed, and torch sees one")
    return run_parts(args, lambda _: measure(args.device, args.rounds))


if __name__ == "__main__":
    sys.exit(main())
