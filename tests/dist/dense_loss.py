"""Compute losses of full logits by plain autograd, as the reference for the distributed losses.

The divergences come from `gkd.loss.divergence`, which has its own tests. The rest is independent: the softmax, the
outcome tables, the terms of the sampled token, and the weighted sum.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from gkd.config.loss_spec import LossSpec, LossTerm
from gkd.loss.divergence import divergence_of, forward_kl, outcome_tables
from gkd.types import TokenTargets
from tests.device import host

N_SUPPORT = 16  # of the student's most probable tokens, in teachability


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
        loss = divergence_of(term.name)(*tables, term)
        if spec.has_residual and teacher_logprobs is None:
            loss = loss + _residual(spec, targets, student, tables)
        losses = losses + term.weight * loss
    if spec.token_clip:  # a constant above the limit
        losses = losses.clamp(max=spec.token_clip)
    targets_of = [(term, _scaled_teacher(spec, targets, teacher_logprobs)) for term in spec.policy_gradients]
    if spec.reference_weight:
        targets_of.append((LossTerm("k3", spec.reference_weight), targets.reference_logprobs))
    rho = (student.detach() - targets.rollout_logprobs).exp()
    rho = rho.clamp(max=spec.importance_clip) if spec.importance_clip else rho
    for term, target in targets_of:
        ratio = student.detach() - target.to(student.dtype)
        if spec.token_clip and term in spec.policy_gradients:
            ratio = ratio.clamp(-spec.token_clip, spec.token_clip)
        value = {"k1": ratio, "k2": ratio**2 / 2, "k3": (-ratio).exp() - 1 + ratio}[term.name]
        score = rho * ratio * student  # its gradient is that of REINFORCE
        loss = rho * value + score - score.detach()
        losses = losses + term.weight * loss.masked_fill(~targets.on_policy, 0.0)
    if spec.has_rewards:
        advantages, (low, high) = targets.advantages.to(student.dtype), spec.reward_clip
        ratio = (student - targets.rollout_logprobs).exp()
        limited = torch.where(advantages > 0, ratio.clamp(max=1 + high), ratio.clamp(min=1 - low))
        losses = losses - spec.reward_weight * (limited * advantages).masked_fill(~targets.on_policy, 0.0)
    if spec.sft is not None:
        losses = losses - spec.sft.weight * student.masked_fill(targets.on_policy, 0.0)
    return losses


def _scaled_teacher(spec: LossSpec, targets: TokenTargets, teacher_logprobs: Tensor | None) -> Tensor:
    """Return [N] logprobs whose k1 is G-OPD's: lambda (log p - log r) + log r."""
    sampled = targets.sampled_ids[:, None]
    teacher = targets.sampled_logprobs if teacher_logprobs is None else teacher_logprobs.gather(1, sampled)[:, 0]
    if spec.teacher_reward_scale == 1:
        return teacher
    reference = targets.reference_logprobs.to(teacher.dtype)
    return spec.teacher_reward_scale * (teacher - reference) + reference


def dense_factors(
    spec: LossSpec, targets: TokenTargets, logits: Tensor, teacher_logprobs: Tensor | None = None
) -> Tensor:
    """Return [N] factors of distill.token_weight and token_share, from the formulas of docs/losses.md. As above."""
    log_q = (logits.detach() / spec.temperature).log_softmax(dim=-1)
    sampled = targets.sampled_ids[:, None]
    if spec.token_weight == "position":
        log_p = targets.sampled_logprobs if teacher_logprobs is None else teacher_logprobs.gather(1, sampled)[:, 0]
        gap = host(((log_q.gather(1, sampled)[:, 0] - log_p).abs() * targets.on_policy).double())
    elif spec.token_weight == "teachability":
        kl = forward_kl(*_outcomes(spec, targets, log_q, teacher_logprobs), LossTerm("forward_kl"))
        best = log_q.topk(min(N_SUPPORT, log_q.shape[1])).indices.tolist()
        mass = np.array([_mass(row, set(ids), targets, teacher_logprobs) for row, ids in enumerate(best)])
    factors = np.zeros(len(log_q))
    for sequence in set(targets.sequences.tolist()):
        rows = np.flatnonzero(host(targets.sequences) == sequence)
        if spec.token_weight == "entropy":
            raw = -host((log_q.exp() * log_q).sum(dim=-1).double())[rows]
        elif spec.token_weight == "teachability":
            raw = _between_quantiles(host(kl.double())[rows]) * _between_quantiles(mass[rows])
        else:
            whole = gap[rows[:-1]].sum()
            raw = np.array([1.5 - (0.5 * gap[rows[:t]].sum() / whole if whole else 0.0) for t in range(len(rows))])
        kept = sorted(range(len(rows)), key=lambda t: (-raw[t], t))[: math.ceil(round(spec.token_share * len(rows), 9))]
        whole = raw[kept].sum()
        factors[rows[kept]] = len(rows) * (raw[kept] / whole if whole else 1.0 / len(kept))
    return torch.from_numpy(factors).to(log_q)


def _mass(row: int, best: set[int], targets: TokenTargets, teacher_logprobs: Tensor | None) -> float:
    """Return the teacher's probability of some tokens; of those in its list if it sent one."""
    if teacher_logprobs is not None:
        return float(teacher_logprobs[row].exp()[sorted(best)].sum())
    pairs = zip(targets.topk_ids[row].tolist(), targets.topk_logprobs[row].tolist(), strict=True)
    return sum(math.exp(log_p) for token, log_p in pairs if token in best)


def _between_quantiles(values: np.ndarray) -> np.ndarray:
    low, high = np.quantile(values, [0.05, 0.95])
    return np.clip((values - low) / (high - low), 0, 1) if high - low >= 1e-6 else np.ones_like(values)


def _residual(spec: LossSpec, targets: TokenTargets, student: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """Return [N] with the value and gradient of the residual."""
    outside = targets.on_policy & ~(targets.topk_ids == targets.sampled_ids[:, None]).any(dim=1)
    rho = (student - targets.rollout_logprobs).exp().detach()
    rho = rho.clamp(max=spec.importance_clip) if spec.importance_clip else rho
    q_tail, p_tail = (table[:, -1].detach() for table in tables)
    difference = rho * (student.detach() - targets.sampled_logprobs.to(student.dtype) - (q_tail - p_tail))
    score = difference * student  # its gradient is that of REINFORCE
    return (difference + score - score.detach()).masked_fill(~outside, 0.0)


def _outcomes(
    spec: LossSpec, targets: TokenTargets, log_q: Tensor, teacher_logprobs: Tensor | None
) -> tuple[Tensor, Tensor]:
    if teacher_logprobs is not None:
        return log_q, teacher_logprobs.to(log_q.dtype)
    picked = log_q.gather(1, targets.topk_ids.clamp(min=0))
    listed = targets.topk_ids >= 0
    return outcome_tables(picked, targets.topk_logprobs, spec.tail, listed=listed, tail_mass=targets.tail_mass)
