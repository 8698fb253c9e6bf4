"""Measure one case of `bench_memory`: offloads and reloads of a model, in a separate process.

    python -m tests.bench.memory_case '{"how": "states", "device": "cpu", "sizes": {...}, "rounds": 10}'

prints a JSON line. While the model is away, blocks of many sizes are allocated and freed on the device, like the
activations of a student that trains: on a GPU 25 GB of them, the peak that the claims of `bench_memory` start from.
The weights are random and made on the device: only their bytes matter.
"""

from __future__ import annotations

import gc
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch
from torch import Tensor, nn

from gkd.actor.fsdp.model import build_on_meta, reshard, shard
from gkd.memory.states import OPTIMIZER, PARAMS, States
from gkd.memory.usage import trim_heap
from tests.bench.student_case import SIZES, only_rank

MIB = 1 << 20
# By device: bytes of the blocks between two rounds, and of the largest: smaller than most weights of 7B (136 MB).
OTHERS = {"cuda": (25_000_000_000, 64 * MIB), "cpu": (32 * MIB, MIB)}


@dataclass(frozen=True, slots=True)
class Case:
    """`how`: manual (`module.cpu()` and empty_cache, `module.cuda()`) | states (ours). `moments`: with two float32
    tensors for each parameter, as of Adam.
    """

    how: str
    device: str
    sizes: dict[str, Any]
    dtype: str
    rounds: int
    moments: bool = False


@dataclass(slots=True)
class Measured:
    """Seconds of each reload and offload. Sizes are bytes on the device unless noted otherwise."""

    n_bytes: int
    on_s: list[float] = field(default_factory=list)
    off_s: list[float] = field(default_factory=list)
    copy_to_host: float = 0.0  # bytes a second, one pinned copy of the same size
    copy_to_device: float = 0.0
    left: list[int] = field(default_factory=list)  # allocated after each round
    peak: int = 0  # allocated, of the model and of the blocks in between
    peak_reserved: int = 0
    empty_cache_calls: int = 0
    host_rss: list[int] = field(default_factory=list)
    outputs_equal: bool = True


def run(case: Case) -> Measured:
    from transformers import Qwen3Config

    with tempfile.TemporaryDirectory(prefix="gkd_bench_") as folder, only_rank(case.device):
        Qwen3Config(**(SIZES | case.sizes)).save_pretrained(folder)
        return _measure(case, torch.device(case.device), Path(folder))


def _measure(case: Case, device: torch.device, folder: Path) -> Measured:
    dtype, on_card = getattr(torch, case.dtype), device.type == "cuda"
    hf = build_on_meta(folder, dtype=dtype, packing=False)
    hf.requires_grad_(False)
    model = shard(hf, device=device, dtype=dtype, recompute=False, offload=False)
    torch.manual_seed(0)
    # What fully_shard holds. `to_local()` returns views: what is assigned to these moves nothing.
    weights = [param._local_tensor for param in model.parameters()]  # type: ignore[attr-defined]
    for weight in weights:
        weight.fill_(1.0) if weight.ndim == 1 else weight.normal_(std=0.02)
    moments = [torch.zeros(w.shape, device=device) for w in weights for _ in range(2 * case.moments)]
    come, go = _switch(case, device, model, moments)
    measured = Measured(sum(t.numel() * t.itemsize for t in [*weights, *moments]))
    if on_card and case.how == "states":
        measured.copy_to_host, measured.copy_to_device = _copy_rates(min(measured.n_bytes, 4 << 30), device)
    calls, real = [0], torch.cuda.empty_cache

    def counted() -> None:
        calls[0] += 1
        real()

    torch.cuda.empty_cache = counted
    tokens = torch.arange(1, 513, device=device)[None] % case.sizes["vocab_size"]
    first: Tensor | None = None
    if on_card:
        real()  # of building the model and of the copies; not counted
        torch.cuda.reset_peak_memory_stats(device)
    for number in range(case.rounds):
        measured.on_s.append(_seconds(come, device))
        logits = _forward(model, tokens)
        first = logits if first is None else first
        measured.outputs_equal &= torch.equal(logits, first)
        measured.off_s.append(_seconds(go, device))
        storages = [param._local_tensor.untyped_storage() for param in model.parameters()]  # type: ignore[attr-defined]
        storages += [moment.untyped_storage() for moment in moments]
        on_cpu = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
        measured.left.append(torch.cuda.memory_allocated(device) if on_card else on_cpu)
        _blocks_in_between(device, number)
        trim_heap()  # without what the C library keeps of freed blocks
        measured.host_rss.append(psutil.Process().memory_info().rss)
    if on_card:
        measured.peak = torch.cuda.max_memory_allocated(device)
        measured.peak_reserved = torch.cuda.max_memory_reserved(device)
    measured.empty_cache_calls = calls[0]
    return measured


def _seconds(step: Callable[[], object], device: torch.device) -> float:
    began = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


def _switch(
    case: Case, device: torch.device, model: nn.Module, moments: list[Tensor]
) -> tuple[Callable[[], object], Callable[[], object]]:
    """(come, go), and the state is away."""
    if case.how == "states":
        weights = [param._local_tensor for param in model.parameters()]  # type: ignore[attr-defined]
        states = States(device, lambda: {PARAMS: weights, OPTIMIZER: moments})
        states.offload_states()
        return states.reload_states, states.offload_states

    def move(where: torch.device) -> None:
        # On the CPU both sides are host memory, and without a copy nothing would move.
        moved = partial(torch.Tensor.to, device=where, copy=device.type == "cpu")
        model._apply(moved)
        for moment in moments:
            moment.data = moved(moment.data)

    def away() -> None:
        move(torch.device("cpu"))
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()

    away()
    return partial(move, device), away


@torch.no_grad()
def _forward(model: nn.Module, tokens: Tensor) -> Tensor:
    """[16] logits of the last position. Optimizer states take part by being there."""
    rows = torch.tensor([tokens.shape[1] - 1], device=tokens.device)
    logits: Tensor = model(tokens, rows)
    reshard(model)  # what is gathered of one rank's shards is a copy
    return logits[0, :16].float().clone()


def _blocks_in_between(device: torch.device, number: int) -> None:
    """Allocate and free many blocks, some of which outlive others: the same ones for each way of moving."""
    generator, blocks = torch.Generator().manual_seed(number), list[Tensor]()
    n_bytes, largest = OTHERS[device.type]
    while n_bytes > 0:
        size = min(int(torch.randint(1, largest, (), generator=generator)), n_bytes)
        blocks.append(torch.empty(size, dtype=torch.uint8, device=device))
        n_bytes -= size
    del blocks[::2]
    more = [torch.empty(largest // 3, dtype=torch.uint8, device=device) for _ in range(16)]
    del blocks, more


def _copy_rates(n_bytes: int, device: torch.device) -> tuple[float, float]:
    """Bytes a second to the host and to the device: one large pinned copy, the best of five."""
    host = torch.empty(n_bytes, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(n_bytes, dtype=torch.uint8, device=device)
    rates = []
    for target, source in ((host, there), (there, host)):
        best = float("inf")
        for _ in range(5):
            torch.cuda.synchronize(device)
            began = time.perf_counter()
            target.copy_(source, non_blocking=True)
            torch.cuda.synchronize(device)
            best = min(best, time.perf_counter() - began)
        rates.append(n_bytes / best)
    return rates[0], rates[1]


def share_of_copy(measured: Measured) -> tuple[float, float]:
    """Return the median share of a pinned copy's bandwidth that a reload and an offload reach."""
    reload_rate, offload_rate = (measured.n_bytes / median(seconds) for seconds in (measured.on_s, measured.off_s))
    return reload_rate / measured.copy_to_device, offload_rate / measured.copy_to_host


if __name__ == "__main__":
    print(json.dumps(asdict(run(Case(**json.loads(sys.argv[1]))))))
