"""Compute a loss and its gradient over chunks of rows, so that logits exist for one chunk at a time.

The gradient of a chunk is computed in the forward pass, while its logits exist. This saves the second product with
the LM head that recomputing the logits would need. The loss is a sum over rows, so the backward pass only scales the
stored gradients.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from gkd.loss.row_kernels import statistics_dtype
from gkd.types import TokenTargets

if TYPE_CHECKING:
    from gkd.loss.distill_loss import DistillLoss


class HeadLoss(torch.autograd.Function):
    """LM head and loss together; see `DistillLoss.from_hidden`."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        targets: TokenTargets,
        loss: DistillLoss,
        reduce_hidden_grad: bool,
        head_grad_sum: Tensor | None,
        bias: Tensor | None,
        cap: float | None,
        scales: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        needs_hidden_grad, needs_head_grad = ctx.needs_input_grad[:2]
        targets = targets.on(hidden.device)
        v_valid = loss.shard.n_columns(len(head))
        valid_head = head[:v_valid]
        hidden_grad = torch.empty_like(hidden) if needs_hidden_grad else None
        # The chunks are summed in float32: a running bfloat16 sum would round small contributions away.
        head_grad = head_grad_sum
        if needs_head_grad and head_grad_sum is None:
            head_grad = torch.zeros_like(head, dtype=statistics_dtype(head))
        sums = torch.zeros(len(loss.report_names), dtype=torch.float64, device=hidden.device)
        step = loss.rows_per_chunk(len(head), hidden.element_size())  # counts the padded size: equal on all ranks
        chunks = loss.chunks(targets, len(hidden), step)
        bias_grad = None
        if bias is not None and ctx.needs_input_grad[6]:
            bias_grad = torch.zeros_like(bias, dtype=statistics_dtype(bias))
        with_grad = any(grad is not None for grad in (hidden_grad, head_grad, bias_grad))
        tanh: Tensor | None = None  # of the chunk's logits, with a soft cap
        buffer = logits_buffer(hidden, max((rows.stop - first for first, rows in chunks), default=0), v_valid)
        for first, rows in chunks:
            needed = slice(first, rows.stop)
            logits = torch.mm(hidden[needed], valid_head.T, out=buffer[: rows.stop - first])
            if bias is not None:
                logits.add_(bias[:v_valid])
            if cap is not None:
                logits.div_(cap).tanh_()
                tanh = logits.clone() if with_grad else None
                logits.mul_(cap)
            if scales is not None:
                logits.mul_(scales[needed])
            sums += loss.chunk(logits, targets, rows, with_grad=with_grad)
            if scales is not None:  # `logits` may be a gradient now
                logits.mul_(scales[needed])
            if tanh is not None:
                torch.ops.aten.tanh_backward.grad_input(logits, tanh, grad_input=logits)
            if bias_grad is not None:
                bias_grad[:v_valid] += logits.sum(0, dtype=bias_grad.dtype)
            if hidden_grad is not None:
                n_before = rows.start - first  # rows of the chunk before, which have a gradient already
                torch.mm(logits[n_before:], valid_head, out=hidden_grad[rows])
                hidden_grad[first : rows.start].addmm_(logits[:n_before], valid_head)
            if head_grad is not None:
                add_product(head_grad[:v_valid], logits.T, hidden[needed])
        if hidden_grad is not None and reduce_hidden_grad and loss.shard.group is not None:
            dist.all_reduce(hidden_grad, group=loss.shard.group)
        own_head_grad = None if head_grad is None or head_grad is head_grad_sum else head_grad.to(head.dtype)
        own_bias_grad = None if bias is None or bias_grad is None else bias_grad.to(bias.dtype)
        ctx.save_for_backward(hidden_grad, own_head_grad, own_bias_grad)
        ctx.unset_like = head.detach() if needs_head_grad and own_head_grad is None else None
        ctx.mark_non_differentiable(sums)
        return sums[0].to(statistics_dtype(hidden), copy=True), sums

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        # In place. Autograd detects a second backward pass, which would use scaled gradients, and raises.
        hidden_grad, head_grad, bias_grad = (None if g is None else g.mul_(grad_outputs[0]) for g in ctx.saved_tensors)
        if ctx.unset_like is not None:
            head_grad = torch.empty_like(ctx.unset_like)
        return hidden_grad, head_grad, None, None, None, None, bias_grad, None, None


def capped(logits: Tensor, cap: float | None) -> Tensor:
    """Return cap * tanh(logits / cap), as in Gemma 2; None: the logits."""
    return logits if cap is None else cap * torch.tanh(logits / cap)


def logits_buffer(hidden: Tensor, n_rows: int, n_columns: int) -> Tensor:
    """Return [n_rows, n_columns], uninitialized, with the dtype and device of `hidden`.

    On a GPU each row starts at a multiple of 16 elements. Otherwise the kernels' loads would not be vectorized, and the
    products with the LM head would be unaligned. On a CPU the fast path of the kernels needs adjacent rows.
    """
    stride = n_columns if hidden.device.type == "cpu" else -(-n_columns // 16) * 16
    return hidden.new_empty((n_rows, stride))[:, :n_columns]


class LogitsLoss(torch.autograd.Function):
    """The loss of existing logits; see `DistillLoss.from_logits`."""

    @staticmethod
    def forward(ctx: Any, logits_local: Tensor, targets: TokenTargets, loss: DistillLoss) -> tuple[Tensor, Tensor]:
        (with_grad, *_) = ctx.needs_input_grad
        targets = targets.on(logits_local.device)
        n_rows, v_local = logits_local.shape
        v_valid = loss.shard.n_columns(v_local)
        step = loss.rows_per_chunk(v_local, logits_local.element_size())
        # The gradient overwrites the logits, chunk by chunk.
        grad = logits_local.detach() if with_grad else None
        sums = torch.zeros(len(loss.report_names), dtype=torch.float64, device=logits_local.device)
        for start in range(0, n_rows, step):
            rows = slice(start, min(start + step, n_rows))
            sums += loss.chunk(logits_local[rows, :v_valid], targets, rows, with_grad=with_grad)
        if grad is not None:
            grad[:, v_valid:] = 0.0
        ctx.save_for_backward(grad)
        ctx.mark_non_differentiable(sums)
        return sums[0].to(statistics_dtype(logits_local), copy=True), sums

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = ctx.saved_tensors
        return grad.mul_(grad_outputs[0]), None, None


@functools.cache
def adds_to_float32(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether this torch adds a product of `dtype` to a float32 matrix in one call, without a copy of either."""
    total = torch.ones(16, 16, device=device)
    one = torch.ones(16, 16, device=device, dtype=dtype)
    try:
        torch.addmm(total, one, one, torch.float32, out=total)
    except RuntimeError:
        return False
    return bool((total == 17).all())


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Compute total += a @ b in the dtype of `total`."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif a.is_cuda and adds_to_float32(a.device, a.dtype):
        torch.addmm(total, a, b, total.dtype, out=total)
    elif a.is_cuda:
        total += torch.mm(a, b, out_dtype=total.dtype)  # the tensor cores accumulate and return float32
    else:
        total += torch.mm(a, b)
