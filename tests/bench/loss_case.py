"""One measurement of `bench_loss`, in a process of its own so that its peak of memory is its own.

    python -m tests.bench.loss_case '{"kind": "topk", "variant": "ours", "rows": 256, "vocabulary": 32000}'

prints a JSON line. It stands alone, so that one case can be looked at with a profiler.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor

from gkd.types import TokenTargets
from tests.bench.command import in_fresh_process
from tests.bench.loss_variants import head_kl, jsd, topk_kl
from tests.footprint_case import Meter

TOPK = 64
_LOSSES: dict[str, Callable[..., Tensor]] = {"topk": topk_kl, "jsd": jsd, "head": head_kl}
_BLOCK = 64  # rows of random numbers; the rows after them repeat, which no variant can notice


@dataclass(frozen=True, slots=True)
class Case:
    kind: str  # topk | jsd | head | head_gradient | memcpy
    variant: str  # of `loss_variants`; "" for memcpy
    rows: int
    vocabulary: int
    hidden: int = 896  # head and head_gradient only
    threads: int = 2


@dataclass(frozen=True, slots=True)
class Measured:
    """Time and memory of one forward and backward pass, or of one copy of [rows, vocabulary] float32 (memcpy)."""

    seconds: float
    extra_bytes: int  # peak beyond the inputs and their gradients
    loss: float  # the same for all variants of a kind, or the comparison means nothing


def measure(case: Case, timeout_s: float = 600.0) -> Measured:
    """Runs the case in a fresh process; raises as `in_fresh_process`."""
    return Measured(
        **in_fresh_process("tests.bench.loss_case", asdict(case), threads=case.threads, timeout_s=timeout_s)
    )


def run(case: Case) -> Measured:
    """In this process, whose first measurement it has to be."""
    torch.set_num_threads(case.threads)
    torch.manual_seed(0)
    if case.kind == "memcpy":
        return _memcpy(case)
    _pass(replace(case, rows=_BLOCK, vocabulary=1000))  # starts threads, loads what is loaded lazily
    return _pass(case)


def _pass(case: Case) -> Measured:
    targets = _targets(case)
    if case.kind == "head_gradient":
        return _head_gradient(case, targets)
    if case.kind == "head":
        hidden = torch.randn(case.rows, case.hidden)
        inputs = [hidden, _random_rows(case.vocabulary, case.hidden).mul_(3.0 * case.hidden**-0.5)]
    else:
        inputs = [_random_rows(case.rows, case.vocabulary).mul_(3.0)]
    for tensor in inputs:
        tensor.requires_grad_()
    meter = _new_meter()
    start = time.perf_counter()
    loss = _LOSSES[case.kind](case.variant, *inputs, targets)
    gradients = torch.autograd.grad(loss, inputs)
    seconds = time.perf_counter() - start
    extra_bytes = meter.peak()
    # A gradient that overwrites its input needs no additional memory.
    own = [g for g, x in zip(gradients, inputs, strict=True) if g.data_ptr() != x.data_ptr()]
    return Measured(seconds, extra_bytes - sum(g.nbytes for g in own), float(loss.detach()))


def _new_meter() -> Meter:
    """Return a meter of the memory from here on, in addition to what is resident now."""
    meter = Meter(torch.device("cpu"))
    meter.forget_peak()
    return meter


def _head_gradient(case: Case, targets: TokenTargets) -> Measured:
    """Add the LM head's gradient of a micro-batch to a buffer of gradients."""
    hidden = torch.randn(case.rows, case.hidden).requires_grad_()
    head = _random_rows(case.vocabulary, case.hidden).mul_(3.0 * case.hidden**-0.5).requires_grad_()
    total = torch.full_like(head, 0.5, requires_grad=False)
    meter = _new_meter()
    start = time.perf_counter()
    if case.variant == "in_place":
        loss = head_kl("fused", hidden, head.detach(), targets, head_grad_sum=total)
        (gradient,) = torch.autograd.grad(loss, hidden)
    else:
        loss = head_kl("fused", hidden, head, targets)
        gradient, of_head = torch.autograd.grad(loss, (hidden, head))
        total += of_head
    seconds = time.perf_counter() - start
    return Measured(seconds, meter.peak() - gradient.nbytes, float(loss.detach()))


def _targets(case: Case) -> TokenTargets:
    n, k = case.rows, TOPK
    start = torch.randint(0, case.vocabulary, (n, 1))
    ids = (start + torch.arange(k) * (case.vocabulary // k)) % case.vocabulary
    targets = TokenTargets(ids[:, 0].clone(), torch.zeros(n), torch.ones(n, dtype=torch.bool))
    if case.kind == "jsd":
        targets.logits = _random_rows(n, case.vocabulary).mul_(3.0)
        return targets
    logprobs = (torch.randn(n, k) * 2.0).log_softmax(dim=-1).sort(dim=-1, descending=True).values
    targets.topk_ids, targets.topk_logprobs = ids, logprobs - 0.1
    targets.tail_mass = 1.0 - targets.topk_logprobs.exp().sum(dim=-1)
    return targets


def _random_rows(n: int, width: int) -> Tensor:
    block, rows = torch.randn(_BLOCK, width), torch.empty(n, width)
    for start in range(0, n, _BLOCK):
        rows[start : start + _BLOCK] = block[: n - start]
    return rows


def _memcpy(case: Case) -> Measured:
    source, target = torch.ones(case.rows, case.vocabulary), torch.zeros(case.rows, case.vocabulary)
    start = time.perf_counter()
    target.copy_(source)
    return Measured(time.perf_counter() - start, 0, 0.0)


if __name__ == "__main__":
    print(json.dumps(asdict(run(Case(**json.loads(sys.argv[1]))))))
