"""Test the loss of a micro-batch at its edges: second passes, evaluation, frozen parts, chunk sizes, no rows."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gkd.config.loss_spec import LossSpec, LossTerm
from gkd.errors import DataError, NumericsError
from gkd.loss import chunked
from gkd.loss.chunked import capped
from gkd.loss.distill_loss import DistillLoss
from gkd.types import TokenTargets
from teacher_server.wire.protocol import Signal
from tests.unit.loss_cases import KERNELS, SHARD, V_PADDED, Batch, H, V, distill_loss

SIGNALS: tuple[Signal, ...] = ("topk", "logits", "hidden")
SPEC = LossSpec((LossTerm("jsd"), LossTerm("k3", 0.5), LossTerm("sft", 0.25)), temperature=0.7)


def _forward(
    loss: DistillLoss, hidden: Tensor, head: Tensor, targets: TokenTargets, fused: bool
) -> tuple[Tensor, Tensor]:
    return loss.from_hidden(hidden, head, targets) if fused else loss.from_logits(hidden @ head.T, targets)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("signal", SIGNALS)
def test_a_second_backward_pass_is_refused(signal: Signal, fused: bool) -> None:
    """Fails if a second pass over overwritten memory returns wrong numbers instead of an error."""
    batch = Batch()
    hidden, head = batch.hidden.clone().requires_grad_(), batch.head.clone().requires_grad_()
    total, _ = _forward(batch.loss(SPEC, signal, 3), hidden, head, batch.targets(signal, 0.7), fused)
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError):
        total.backward()


class _Watched(DistillLoss):
    """Record for each chunk whether its gradient was requested."""

    requested: list[bool]

    def chunk(self, logits: Tensor, targets: TokenTargets, rows: slice, *, with_grad: bool) -> Tensor:
        self.requested.append(with_grad)
        return super().chunk(logits, targets, rows, with_grad=with_grad)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("signal", SIGNALS)
def test_evaluation_gives_the_same_numbers_without_a_gradient(signal: Signal, fused: bool) -> None:
    """Fails if eval and training curves do not compare, or an evaluation computes unused gradients."""
    batch = Batch()
    loss = _Watched(SPEC, (signal, "sampled"), SHARD, KERNELS, 1 << 10, batch.teacher_head)
    targets, loss.requested = batch.targets(signal, 0.7), []
    hidden, head = batch.hidden.clone().requires_grad_(), batch.head.clone().requires_grad_()
    trained = _forward(loss, hidden, head, targets, fused)
    loss.requested.clear()
    with torch.no_grad():
        evaluated = _forward(loss, hidden, head, targets, fused)
    assert not any(loss.requested) and not evaluated[0].requires_grad
    assert torch.equal(evaluated[0], trained[0]) and torch.equal(evaluated[1], trained[1])


@pytest.mark.parametrize("signal", SIGNALS)
def test_inputs_and_targets_are_not_changed(signal: Signal) -> None:
    """Fails if chunks overwrite the hidden states, the head or the targets, which the next pass reads again."""
    batch, fresh = Batch(), Batch()
    targets, before = batch.targets(signal, 0.7), fresh.targets(signal, 0.7)
    hidden, head = batch.hidden.clone().requires_grad_(), batch.head.clone().requires_grad_()
    _forward(batch.loss(SPEC, signal, 3), hidden, head, targets, True)[0].backward()
    assert torch.equal(hidden, fresh.hidden) and torch.equal(head, fresh.head)
    for name in ("topk_logprobs", "topk_ids", "tail_mass", "logits", "hidden", "sampled_logprobs", "sampled_ids"):
        value, expected = getattr(targets, name), getattr(before, name)
        assert value is expected is None or torch.equal(value, expected), name


@pytest.mark.parametrize("cap", [0.5, None])
@pytest.mark.parametrize("temperatures", [(), (0.7, 1.4)])
@pytest.mark.parametrize("signal", SIGNALS)
def test_bias_and_soft_cap_are_those_of_whole_logits(
    signal: Signal, temperatures: tuple[float, ...], cap: float | None
) -> None:
    """Fails if a chunk's gradient leaves out the cap's slope, or a route's temperature divides before cap and bias."""
    batch = Batch()
    loss = batch.loss(replace(SPEC, temperatures=temperatures), signal, 3)
    targets = replace(batch.targets(signal, 0.7), routes=torch.arange(len(batch.hidden)) % 2 if temperatures else None)
    results = []
    for fused in (True, False):
        hidden, head = batch.hidden.clone().requires_grad_(), batch.head.clone().requires_grad_()
        bias = torch.linspace(-1, 1, len(head), dtype=head.dtype, requires_grad=True)
        if fused:
            total, sums = loss.from_hidden(hidden, head, targets, bias=bias, cap=cap)
        else:
            total, sums = loss.from_logits(capped(hidden @ head.T + bias, cap), targets)
        total.backward()
        results.append((total.detach(), sums, hidden.grad, head.grad, bias.grad))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    with torch.no_grad():
        evaluated = loss.from_hidden(batch.hidden, batch.head, targets, bias=bias, cap=cap)[0]
    torch.testing.assert_close(evaluated, results[1][0])


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("signal", SIGNALS)
def test_the_heads_gradient_is_added_to_a_sum_in_place(signal: Signal, frozen: bool) -> None:
    """Fails if gradients of micro-batches overwrite each other, are in the sum twice, or padding rows get one."""
    batch = Batch()
    loss, targets = batch.loss(SPEC, signal, 3), batch.targets(signal, 0.7)
    grads = []
    total = torch.full_like(batch.head, 0.25)
    for head_grad_sum in (None, total, total):
        hidden, head = batch.hidden.clone().requires_grad_(), batch.head.clone().requires_grad_()
        used = head.detach() if frozen and head_grad_sum is not None else head
        loss.from_hidden(hidden, used, targets, head_grad_sum=head_grad_sum)[0].backward()
        grads.append((hidden.grad, head.grad))
        assert (head.grad is None) == (used is not head)  # the hook of its own gradient must run
    (of_hidden, of_head), (in_place, _), _ = grads
    torch.testing.assert_close(total - 0.25, 2 * of_head, rtol=1e-12, atol=1e-12)
    assert torch.equal(in_place, of_hidden) and torch.equal(total[V:], torch.full_like(total[V:], 0.25))
    with torch.no_grad():  # an evaluation between two steps
        loss.from_hidden(batch.hidden, batch.head, targets, head_grad_sum=total)
    torch.testing.assert_close(total - 0.25, 2 * of_head, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("signal", SIGNALS)
def test_rows_of_logits_are_aligned_on_a_gpu(signal: Signal, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if rows of an odd vocabulary are unaligned on a GPU, or rows that are apart change loss or gradients."""
    for n_columns in (1, 16, 151_665):
        rows = chunked.logits_buffer(torch.empty(4, H, device="meta"), 3, n_columns)
        assert rows.shape == (3, n_columns) and rows.stride(1) == 1 and rows.stride(0) % 16 == 0
        assert chunked.logits_buffer(torch.empty(4, H), 3, n_columns).is_contiguous()  # what the CPU's kernels need
    batch, found = Batch(), []
    for apart in (False, True):
        if apart:
            monkeypatch.setattr(chunked, "logits_buffer", lambda hidden, n, v: hidden.new_empty((n, v + 3))[:, :v])
        hidden, head = batch.hidden.clone().requires_grad_(), batch.head.clone().requires_grad_()
        loss, _ = batch.loss(SPEC, signal, 3).from_hidden(hidden, head, batch.targets(signal, 0.7))
        loss.backward()
        found.append((loss.detach(), hidden.grad, head.grad))
    torch.testing.assert_close(found[0], found[1], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("added", "expected"), [(16.0, True), (0.0, False), (None, False)])
def test_products_are_added_to_float32_where_torch_does_it(
    monkeypatch: pytest.MonkeyPatch, added: float | None, expected: bool
) -> None:
    """Fails if a torch that refuses the call, or one that leaves the sum as it is, loses the LM head's gradient."""
    calls: list[str] = []

    def addmm(total: Tensor, a: Any, b: Any, dtype: torch.dtype, *, out: Tensor) -> None:
        calls.append("addmm")
        if added is None:
            raise NotImplementedError("addmm.dtype_out on this backend")
        out += added

    def mm(a: Any, b: Any, *, out_dtype: torch.dtype) -> Tensor:
        calls.append("mm")
        return torch.full((2, 2), 16.0, dtype=out_dtype)

    monkeypatch.setattr(torch, "addmm", addmm)
    monkeypatch.setattr(torch, "mm", mm)
    chunked.adds_to_float32.cache_clear()
    assert chunked.adds_to_float32(torch.device("cpu"), torch.bfloat16) == expected
    on_card: Any = SimpleNamespace(dtype=torch.bfloat16, is_cuda=True, device=torch.device("cpu"))
    total = torch.ones(2, 2)
    chunked.add_product(total, on_card, on_card)
    assert (total == 17).all() and calls == ["addmm", "addmm" if expected else "mm"]
    chunked.adds_to_float32.cache_clear()


class _LargestNew(TorchDispatchMode):
    """Record the largest tensor that an operation in the block returns in memory of its own."""

    def __init__(self, *known: Tensor) -> None:
        super().__init__()
        self._known, self.largest = {tensor.untyped_storage().data_ptr() for tensor in known}, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.untyped_storage().data_ptr() not in self._known:
            self.largest = max(self.largest, out.numel())
        return out


def test_a_gradient_in_place_needs_no_memory_of_the_heads_size() -> None:
    """Fails if the sum is no longer formed in place: gigabytes for a large vocabulary."""
    batch = Batch()
    loss, targets, total = batch.loss(SPEC, "topk", 1), batch.targets("topk", 0.7), torch.zeros_like(batch.head)
    found = []
    for head, into in ((batch.head.clone().requires_grad_(), None), (batch.head, total)):
        hidden = batch.hidden.clone().requires_grad_()
        with _LargestNew(batch.head, total) as mode:
            loss.from_hidden(hidden, head, targets, head_grad_sum=into)[0].backward()
        found.append(mode.largest)
    assert found[0] >= batch.head.numel() > found[1]


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("tables", [True, False])
@pytest.mark.parametrize("signal", SIGNALS)
def test_no_loss_rows(signal: Signal, tables: bool, fused: bool) -> None:
    """Fails if a rank without data, with empty tables or with none, cannot run forward and backward."""
    batch = Batch()
    targets = batch.targets(signal, 0.7).rows(slice(0, 0))
    if not tables:
        targets = TokenTargets(targets.sampled_ids, targets.rollout_logprobs, targets.on_policy)
    hidden = batch.hidden[:0].clone().requires_grad_()
    head = batch.head.clone().requires_grad_()
    loss = batch.loss(SPEC, signal, 3)
    total, sums = _forward(loss, hidden, head, targets, fused)
    total.backward()
    assert float(total) == 0.0 and sums.shape == (len(loss.report_names),) and not sums.any()
    assert hidden.grad.shape == (0, H)
    assert head.grad is not None and not head.grad.any()


def test_targets_are_checked_before_they_are_used() -> None:
    """Fails if malformed targets reach the arithmetic of a path, or are detected only where other ranks wait."""
    batch = Batch()
    logits = batch.hidden @ batch.head.T
    for signal, change, text in (
        ("topk", {"topk_ids": None}, "'topk'"),
        ("hidden", {"hidden": None}, "'hidden'"),
        ("logits", {"logits": None}, "'logits'"),
    ):
        targets = batch.targets(signal, 1.0)
        loss = batch.loss(LossSpec((LossTerm("forward_kl"),)), signal)
        loss.check(targets)
        with pytest.raises(DataError, match=text):
            loss.check(replace(targets, **change))
        foreign = replace(targets, sampled_ids=batch.sampled_ids + 1)
        for compute in (
            loss.check,
            partial(loss.from_hidden, batch.hidden, batch.head),
            partial(loss.from_logits, logits),
        ):
            with pytest.raises(NumericsError):
                compute(foreign)
    half = replace(batch.targets("topk", 1.0), topk_logprobs=None)
    with pytest.raises(DataError):
        batch.loss(LossSpec((LossTerm("forward_kl"),)), "topk").from_logits(logits, half)
    headless = distill_loss(LossSpec((LossTerm("forward_kl"),)), "hidden")
    with pytest.raises(DataError):
        headless.check(batch.targets("hidden", 1.0))
    headless.check(batch.targets("hidden", 1.0).rows(slice(0, 0)))  # a rank without data


def test_rows_per_chunk_fit_its_bytes() -> None:
    """Fails if a chunk is larger than its limit, has no row, or does not count the teacher's logits."""
    topk = DistillLoss(SPEC, ("topk",), SHARD, KERNELS, chunk_bytes=1000)
    whole = DistillLoss(SPEC, ("hidden",), SHARD, KERNELS, chunk_bytes=1000)
    assert topk.rows_per_chunk(100, 2) == 5 and topk.rows_per_chunk(101, 2) == 4
    assert whole.rows_per_chunk(100, 2) == 1 and whole.rows_per_chunk(16, 2) == 10
    assert topk.rows_per_chunk(10**6, 2) == 1 and topk.rows_per_chunk(0, 2) >= 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_head_gradient_is_summed_in_float32(dtype: torch.dtype) -> None:
    """Fails if chunks of a bfloat16 head's gradient are added in bfloat16, where 256 + 1 is 256."""
    n = 400
    batch = Batch(
        hidden=torch.ones(n, H, dtype=dtype),
        head=torch.zeros(V_PADDED, H, dtype=dtype),
        sampled_ids=torch.full((n,), 3),
        rollout_logprobs=torch.zeros(n),
        on_policy=torch.zeros(n, dtype=torch.bool),
    )
    targets = TokenTargets(batch.sampled_ids, batch.rollout_logprobs, batch.on_policy, sampled_logprobs=torch.zeros(n))
    loss = DistillLoss(LossSpec((LossTerm("sft"),)), ("sampled",), SHARD, KERNELS, chunk_bytes=1)
    head = batch.head.clone().requires_grad_()
    total, sums = loss.from_hidden(batch.hidden, head, targets)
    total.backward()
    assert total.dtype == torch.float32 and sums.dtype == torch.float64
    assert head.grad.dtype == dtype
    assert float(head.grad[3, 0]) == pytest.approx(-n * (1 - 1 / SHARD.n_valid), rel=1e-2)
