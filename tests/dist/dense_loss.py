"""Compute losses of full logits by plain autograd, as the reference for the distributed losses.

The divergences come from `gkd.loss.divergence`, which has its own tests. The rest is independent: the softmax, the
outcome tables, the terms of the sampled token, and the weighted sum.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gkd.config.loss_spec import LossSpec
from gkd.loss.divergence import DIVERGENCES, outcome_tables
from gkd.types import TokenTargets


def dense_losses(
    spec: LossSpec, targets: TokenTargets, logits: Tensor, teacher_logprobs: Tensor | None = None
) -> Tensor:
    """Return [N] losses with the values and gradients of `DistillLoss`.

    Args:
        targets: of the N rows.
        logits: [N, V] the student's, of the true vocabulary, any float dtype; not yet divided by the temperature.
        teacher_logprobs: [N, V] nats, the teacher's full distribution; None: use the tables of `targets`.
    """
    log_q = (logits / spec.temperature).log_softmax(dim=-1)
    sampled = targets.sampled_ids[:, None]
    student = log_q.gather(1, sampled)[:, 0]
    losses = torch.zeros_like(student)
    for term in spec.divergences:
        tables = _outcomes(spec, targets, log_q, teacher_logprobs)
        losses = losses + term.weight * DIVERGENCES[term.name](*tables, term)
    for term in spec.policy_gradients:
        teacher = targets.sampled_logprobs if teacher_logprobs is None else teacher_logprobs.gather(1, sampled)[:, 0]
        assert teacher is not None
        ratio = student.detach() - teacher.to(student.dtype)
        rho = (student.detach() - targets.rollout_logprobs).exp()
        rho = rho.clamp(max=spec.importance_clip) if spec.importance_clip else rho
        value = {"k1": ratio, "k2": ratio**2 / 2, "k3": (-ratio).exp() - 1 + ratio}[term.name]
        score = rho * ratio * student  # its gradient is that of REINFORCE
        loss = rho * value + score - score.detach()
        losses = losses + term.weight * loss.masked_fill(~targets.on_policy, 0.0)
    if spec.sft is not None:
        losses = losses - spec.sft.weight * student.masked_fill(targets.on_policy, 0.0)
    return losses


def _outcomes(
    spec: LossSpec, targets: TokenTargets, log_q: Tensor, teacher_logprobs: Tensor | None
) -> tuple[Tensor, Tensor]:
    if teacher_logprobs is not None:
        return log_q, teacher_logprobs.to(log_q.dtype)
    assert targets.topk_ids is not None and targets.topk_logprobs is not None
    picked = log_q.gather(1, targets.topk_ids.clamp(min=0))
    listed = targets.topk_ids >= 0
    return outcome_tables(picked, targets.topk_logprobs, spec.tail, listed=listed, tail_mass=targets.tail_mass)
