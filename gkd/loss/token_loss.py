"""Compute the loss and the diagnostics of each token from tables of logprobs.

The tables are small, [N, K] and [N], so autograd computes the gradient. Which tables exist depends on
the teacher's signal. `vocab_parallel` and `full_vocab` compute them from logits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gkd.config.loss_spec import REFERENCE_KL, REWARD, LossSpec, LossTerm
from gkd.errors import DataError
from gkd.loss.divergence import divergence_of, forward_kl, outcome_tables
from gkd.loss.policy_gradient import (
    clipped_policy_loss,
    log_importance_weights,
    policy_gradient_loss,
    reverse_kl_estimate,
    scaled_teacher,
    tail_residual,
)
from gkd.types import TokenTargets

CANONICAL = "canonical"  # whether the student's tokenizer makes this token of the text, see `gkd.text.pair`
# Names in `TokenLosses.values` that are defined only for tokens that the student sampled.
ON_POLICY_VALUES = frozenset(
    {
        *("sampled_reverse_kl", REFERENCE_KL, "importance_weight", "importance_clipped", "engine_kl"),
        *(REWARD, "reward_ratio", "reward_clipped", CANONICAL),
    }
)
# The mean of the first is over the tokens of the second.
END_PROBABILITY = "teacher_end_probability"
ENDED = "ended"

# Sums over the tokens of each route: their number, "token_kl" (0 without a distribution) and "total".
GROUP_SUMS = ("tokens", "token_kl", "total")

# Sums of the size of the losses before and after distill.token_share, only with a distill.token_weight.
LOSS_SIZE = "loss_size"
KEPT_SIZE = "kept_size"
TOKEN_CLIPPED = "token_clipped"
SUPPORT_MASS = "support_mass"  # the teacher's probability of the student's most probable tokens, see `token_weights`

PLAIN = LossTerm("forward_kl")  # the KL of diagnostics
_REFERENCE_ESTIMATE = "k3"  # low variance while student and reference are close, which the term enforces


@dataclass(slots=True)
class TokenLosses:
    """Losses and diagnostics of N tokens.

    `values` has one [N] tensor per name, without gradient: each term (unweighted; 0 on tokens it is not defined for)
    and the diagnostics

        token_kl             KL(teacher || student) in nats, for every loss
        teacher_topk_mass    the teacher's probability of its top-k ids
        student_topk_mass    the student's probability of the same ids
        overlap              sum over the list of min(p, q); 1 - total variation if the list is the vocabulary
        student_entropy      nats
        sampled_reverse_kl   k1 of each on-policy token, without rho; its mean estimates KL(student || teacher)
        reference_kl         rho k3 of each on-policy token; its mean estimates KL(student || reference)
        reward               clipped policy-gradient loss of each on-policy token
        reward_ratio         probability now / probability at rollout, of on-policy tokens
        reward_clipped       1 where the clip of the reward's loss applies
        importance_weight    of on-policy tokens, after the clip
        importance_clipped   1 where the clip applies
        token_clipped        1 where distill.token_clip applies
        engine_kl            k3 of each on-policy token, engine against student; its mean estimates
                             KL(engine || student) at the weights that generated and those that train
        teacher_end_probability  the teacher's probability of the token with which the student ended its response; 0
                             if it is not in the teacher's list. 0 on other tokens
        ended                1 on those tokens
        loss_size            absolute value of the loss before the factor of the token
        kept_size            the same, 0 on tokens whose factor is 0
        support_mass         the teacher's probability of the student's most probable tokens
    """

    total: Tensor  # [N] weighted sum of the terms, differentiable
    values: dict[str, Tensor] = field(default_factory=dict)
    choices: Tensor | None = None  # [N, C, 3], see `gkd.loss.choices`; only where they are requested


def domain_sum(domain: str, name: str) -> str:
    """Return the name of one of `GROUP_SUMS` of the tokens of a route."""
    return f"domain/{domain}/{name}"


def turn_sum(turn: int, name: str) -> str:
    """Return the name of one of `GROUP_SUMS` of the tokens of a turn, counted from 0."""
    return f"turn/{turn + 1}/{name}"


def report_names(spec: LossSpec, *, has_distribution: bool, has_topk: bool, has_sampled: bool) -> tuple[str, ...]:
    """Return the names in `TokenLosses.values` in a fixed order, which is the same on every rank."""
    names = [term.name for term in spec.used]
    if has_distribution:
        names += ["token_kl", "overlap"]
    if has_topk:
        names += ["teacher_topk_mass", "student_topk_mass"]
    if has_sampled:
        names += ["sampled_reverse_kl"]
    if spec.reference_weight:
        names += [REFERENCE_KL]
    if spec.uses_samples:
        names += ["importance_weight", "importance_clipped"]
    if spec.has_rewards:
        names += [REWARD, "reward_ratio", "reward_clipped"]
    if spec.token_clip:
        names += [TOKEN_CLIPPED]
    if has_distribution or has_sampled:
        names += [END_PROBABILITY, ENDED]
    names += ["engine_kl", "student_entropy"]
    if spec.token_weight != "none":
        names += [LOSS_SIZE, KEPT_SIZE]
    return tuple(dict.fromkeys(names))


def topk_losses(
    spec: LossSpec,
    targets: TokenTargets,
    student_topk: Tensor | None,
    student_sampled: Tensor,
    entropy: Tensor,
    *,
    student_tail: Tensor | None = None,
) -> TokenLosses:
    """Compute the losses if the teacher sent a top-k table, its logprob of the sampled token, or both.

    Args:
        student_topk: [N, K] nats, over the full vocabulary, of targets.topk_ids (any value where the id is -1).
        student_sampled: [N] nats, of targets.sampled_ids.
        entropy: [N] nats, the student's.
        student_tail: [N] nats, log of the total probability of all ids outside the list; None: 1 - sum of the list.

    Raises:
        DataError: a term needs a table that `targets` lacks.
    """
    losses = sampled_losses(spec, targets, student_sampled, targets.sampled_logprobs)
    if student_topk is not None:
        if targets.topk_ids is None or targets.topk_logprobs is None:
            raise DataError("the loss needs topk_ids and topk_logprobs of the teacher, and the micro-batch lacks one")
        listed = targets.topk_ids >= 0
        log_p = targets.topk_logprobs.to(student_topk.dtype)
        tables = outcome_tables(
            student_topk, log_p, spec.tail, listed=listed, log_q_tail=student_tail, tail_mass=targets.tail_mass
        )
        divergences = torch.zeros_like(losses.total)
        for term in spec.divergences:
            loss = divergence_of(term.name)(*tables, term)
            if spec.has_residual:
                loss = loss + _residual(spec, targets, student_sampled, tables, log_p)
            divergences = divergences + term.weight * loss
            losses.values[term.name] = loss.detach()
        clipped = add_divergences(losses, spec, divergences)
        if spec.token_clip and tables[0].requires_grad:  # the derivative of an infinite divergence times 0 is NaN
            tables[0].register_hook(lambda grad: grad.masked_fill(clipped[:, None], 0.0))
        with torch.no_grad():
            losses.values["token_kl"] = forward_kl(*tables, PLAIN)
            p = log_p.exp().masked_fill(~listed, 0.0)
            q = student_topk.exp().masked_fill(~listed, 0.0)
            losses.values["teacher_topk_mass"] = p.sum(dim=-1)
            losses.values["student_topk_mass"] = q.sum(dim=-1)
            losses.values["overlap"] = torch.minimum(p, q).sum(dim=-1)
            if END_PROBABILITY not in losses.values:
                is_sampled = targets.topk_ids == targets.sampled_ids[:, None]
                add_ends(losses, targets, p.masked_fill(~is_sampled, 0.0).sum(dim=-1))
    elif spec.divergences:
        raise DataError("the loss compares distributions, and the teacher sent none")
    losses.values["student_entropy"] = entropy.detach()
    return losses


def _residual(
    spec: LossSpec, targets: TokenTargets, student_sampled: Tensor, tables: tuple[Tensor, Tensor], log_p: Tensor
) -> Tensor:
    """Return the residual of on-policy tokens outside the list, [N]; 0 for others.

    Args:
        tables: of student and teacher with the bucket as the last column.
        log_p: [N, K] the teacher's list before `outcome_tables` scaled it.
    """
    if targets.topk_ids is None or targets.sampled_logprobs is None:
        raise DataError("the residual needs the teacher's logprob of each sampled token, and the teacher sent none")
    outside = targets.on_policy & (targets.topk_ids != targets.sampled_ids[:, None]).all(dim=-1)
    log_q_table, log_p_table = (table.detach() for table in tables)
    # The sampled token's probability is scaled as those of the list; their first entry is never padding.
    teacher = targets.sampled_logprobs.to(log_p_table.dtype) + log_p_table[:, 0] - log_p[:, 0].to(log_p_table.dtype)
    # Masked before and after: the logprobs of others may be infinite, and 0 * inf in a backward pass is NaN.
    actor, teacher, rollout, tail = (
        table.masked_fill(~outside, 0.0)
        for table in (student_sampled, teacher, targets.rollout_logprobs, log_q_table[:, -1] - log_p_table[:, -1])
    )
    log_weights, _ = log_importance_weights(actor, rollout, spec.importance_clip)
    return tail_residual(actor, teacher, tail, log_weights).masked_fill(~outside, 0.0)


def sampled_losses(
    spec: LossSpec, targets: TokenTargets, student_sampled: Tensor, teacher_sampled: Tensor | None
) -> TokenLosses:
    """Compute the terms that use only the sampled token, from [N] logprobs of student and teacher."""
    losses = TokenLosses(torch.zeros_like(student_sampled))
    off_policy = ~targets.on_policy
    # Masked before and after: a masked token may have an infinite logprob, and 0 * inf in a backward pass is NaN.
    actor = student_sampled.masked_fill(off_policy, 0.0)
    if teacher_sampled is not None:
        teacher_sampled = teacher_sampled.masked_fill(off_policy, 0.0)
        # k1 and no k3, whose p/q is heavy-tailed while the two are far apart, as at the beginning of a distillation.
        k1 = reverse_kl_estimate("k1", actor.detach(), teacher_sampled)
        losses.values["sampled_reverse_kl"] = k1.masked_fill(off_policy, 0.0)
        add_ends(losses, targets, teacher_sampled.exp())
    rollout = targets.rollout_logprobs.masked_fill(off_policy, 0.0)
    losses.values["engine_kl"] = reverse_kl_estimate("k3", rollout.to(actor.dtype), actor.detach())
    if spec.uses_samples:
        log_weights, clipped = log_importance_weights(actor, rollout, spec.importance_clip)
        losses.values["importance_weight"] = log_weights.exp().masked_fill(off_policy, 0.0)
        losses.values["importance_clipped"] = (clipped & targets.on_policy).to(log_weights.dtype)
        reference = None
        if spec.has_reference:
            if targets.reference_logprobs is None:
                raise DataError("the loss needs the reference's logprob of each sampled token, and there is none")
            reference = targets.reference_logprobs.masked_fill(off_policy, 0.0)
        for term in spec.policy_gradients:
            if teacher_sampled is None:
                raise DataError("the loss needs the teacher's logprob of each sampled token, and the teacher sent none")
            target = scaled_teacher(teacher_sampled, reference, spec.teacher_reward_scale)
            if spec.token_clip:
                log_ratio = target - actor.detach()
                _count_clipped(losses, targets.on_policy & (log_ratio.abs() > spec.token_clip))
                target = actor.detach() + log_ratio.clamp(-spec.token_clip, spec.token_clip)
            loss = policy_gradient_loss(term.name, actor, target, log_weights)
            _add(losses, term.name, term.weight, loss, targets.on_policy)
        if spec.reference_weight and reference is not None:
            loss = policy_gradient_loss(_REFERENCE_ESTIMATE, actor, reference, log_weights)
            _add(losses, REFERENCE_KL, spec.reference_weight, loss, targets.on_policy)
    if spec.has_rewards:
        if targets.advantages is None:
            raise DataError("the loss needs the advantage of each token, and the micro-batch has none")
        advantages = targets.advantages.masked_fill(off_policy, 0.0)
        loss, ratio, clipped = clipped_policy_loss(actor, rollout, advantages, spec.reward_clip)
        _add(losses, REWARD, spec.reward_weight, loss, targets.on_policy)
        losses.values["reward_ratio"] = ratio.masked_fill(off_policy, 0.0)
        losses.values["reward_clipped"] = (clipped & targets.on_policy).to(ratio.dtype)
    if spec.sft is not None:
        _add(losses, spec.sft.name, spec.sft.weight, -student_sampled, off_policy)
    return losses


def sampled_losses_and_slope(
    spec: LossSpec, targets: TokenTargets, student_sampled: Tensor, teacher_sampled: Tensor | None
) -> tuple[TokenLosses, Tensor]:
    """Return `sampled_losses` without gradient, and the derivative of their sum in the student's logprobs, [N]."""
    student_sampled.requires_grad_()
    with torch.enable_grad():
        losses = sampled_losses(spec, targets, student_sampled, teacher_sampled)
        total = losses.total.sum()
    slope = torch.zeros_like(student_sampled)
    if total.requires_grad:
        (slope,) = torch.autograd.grad(total, student_sampled)
    losses.total = losses.total.detach()
    return losses, slope


def add_divergences(losses: TokenLosses, spec: LossSpec, divergences: Tensor) -> Tensor:
    """Add the weighted sum of the divergences of each token, [N], limited to distill.token_clip.

    Returns:
        [N] bool, the tokens above the limit, whose divergences have no gradient.
    """
    clipped = divergences.detach() > (spec.token_clip or math.inf)
    losses.total = losses.total + torch.where(clipped, spec.token_clip, divergences)
    if spec.token_clip:
        _count_clipped(losses, clipped)
    return clipped


def _count_clipped(losses: TokenLosses, clipped: Tensor) -> None:
    before = losses.values.get(TOKEN_CLIPPED)
    is_clipped = clipped.to(losses.total.dtype)
    losses.values[TOKEN_CLIPPED] = is_clipped if before is None else torch.maximum(before, is_clipped)


def weigh(losses: TokenLosses, weights: Tensor | None) -> None:
    """Multiply the losses of N tokens by their factors, [N]; None: all 1."""
    if weights is None:
        return
    size = losses.total.detach().abs()
    losses.values[LOSS_SIZE] = size
    losses.values[KEPT_SIZE] = size.masked_fill(weights == 0, 0.0)
    losses.total = losses.total * weights


def add_ends(losses: TokenLosses, targets: TokenTargets, teacher_probability: Tensor) -> None:
    """Add the teacher's probability of the student's end tokens, from that of the sampled tokens, [N]."""
    ends = torch.zeros_like(targets.on_policy) if targets.ends is None else targets.ends
    losses.values[END_PROBABILITY] = teacher_probability.masked_fill(~ends, 0.0)
    losses.values[ENDED] = ends.to(teacher_probability.dtype)


def _add(losses: TokenLosses, name: str, weight: float, loss: Tensor, where: Tensor) -> None:
    loss = loss.masked_fill(~where, 0.0)
    losses.total = losses.total + weight * loss
    losses.values[name] = loss.detach()
