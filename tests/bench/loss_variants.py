"""The losses that `bench_loss` compares: ours, and what people write instead.

The vocabulary's side of the top-k losses takes [N, V] logits to [N, C] logprobs of chosen ids; what follows on the
[N, C] table is the same for all. Letters: N rows, V vocabulary, C = K + 1 ids a row.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gkd.config.loss_spec import LossSpec, LossTerm
from gkd.config.schema import logits_chunk_bytes
from gkd.loss.distill_loss import DistillLoss
from gkd.loss.row_kernels import TorchRows
from gkd.loss.token_loss import topk_losses
from gkd.loss.vocab_parallel import VocabShard
from gkd.types import TokenTargets

CHUNK_BYTES = logits_chunk_bytes(on_cpu=True)
SPEC = LossSpec((LossTerm("forward_kl"),))
JSD_SPEC = LossSpec((LossTerm("jsd", beta=0.5),))


def topk_kl(variant: str, logits: Tensor, targets: TokenTargets) -> Tensor:
    """The sum over rows of the forward KL on the teacher's top-k, tail as one bucket."""
    assert targets.topk_ids is not None
    if variant == "ours":
        return _distill_loss(SPEC, "topk", logits.shape[1]).from_logits(logits, targets)[0]
    ids = torch.cat([targets.topk_ids, targets.sampled_ids[:, None]], dim=1)
    table = _logprobs(variant, logits, ids)
    # No one but us has the entropy at hand; it is a diagnostic, and its row of zeros costs nothing.
    return topk_losses(SPEC, targets, table[:, :-1], table[:, -1], torch.zeros(len(table))).total.sum()


def jsd(variant: str, logits: Tensor, targets: TokenTargets) -> Tensor:
    """The sum over rows of the JSD, beta = 1/2, of whole distributions."""
    assert targets.logits is not None
    if variant == "ours":
        return _distill_loss(JSD_SPEC, "logits", logits.shape[1]).from_logits(logits, targets)[0]
    # As TRL's GKDTrainer.generalized_jsd_loss goes about it.
    student, teacher = logits.log_softmax(dim=-1), targets.logits.log_softmax(dim=-1)
    share = math.log(0.5)
    mixture = torch.logsumexp(torch.stack([student + share, teacher + share]), dim=0)
    parts = [F.kl_div(mixture, side, reduction="none", log_target=True) for side in (teacher, student)]
    return (0.5 * parts[0] + 0.5 * parts[1]).sum()


def head_kl(
    variant: str, hidden: Tensor, head: Tensor, targets: TokenTargets, head_grad_sum: Tensor | None = None
) -> Tensor:
    """`topk_kl` of the logits hidden [N, H] @ head [V, H] transposed; `head_grad_sum` for `fused`."""
    if variant == "dense":
        return topk_kl("dense", F.linear(hidden, head), targets)
    loss = _distill_loss(SPEC, "topk", len(head))
    if variant == "fused":
        return loss.from_hidden(hidden, head, targets, head_grad_sum=head_grad_sum)[0]
    return loss.from_logits(F.linear(hidden, head), targets)[0]


def _distill_loss(spec: LossSpec, signal: Any, vocabulary: int) -> DistillLoss:
    return DistillLoss(spec, (signal,), VocabShard(0, vocabulary, None), TorchRows(), CHUNK_BYTES)


def _logprobs(variant: str, logits: Tensor, ids: Tensor) -> Tensor:
    if variant == "dense":
        return logits.log_softmax(dim=-1).gather(1, ids)
    picked: Tensor = _UsualLogprobs.apply(logits, ids, variant == "usual_in_place")
    return picked


class _UsualLogprobs(torch.autograd.Function):
    """The usual vocab-parallel operation, for one rank: shift, exp, and the softmax kept for the backward pass."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, ids: Tensor, in_place: bool) -> Tensor:
        shifted = logits.float() - logits.amax(dim=-1, keepdim=True)
        picked = shifted.gather(1, ids)
        softmax = shifted.exp_() if in_place else shifted.exp()
        total = softmax.sum(dim=-1, keepdim=True)
        ctx.save_for_backward(softmax.div_(total), ids)
        ctx.in_place = in_place
        return picked - total.log()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        softmax, ids = ctx.saved_tensors
        (grad,) = grad_outputs
        row_grad = -grad.sum(dim=-1, keepdim=True)
        logits_grad = softmax.mul_(row_grad) if ctx.in_place else softmax * row_grad
        return logits_grad.scatter_add_(1, ids, grad), None, None
