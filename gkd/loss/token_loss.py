"""Tables of logprobs -> the loss of each token, term by term, and what to report beside it.

The last step of the road: [N, K] and [N] tables, small, so plain autograd does the gradient. Which
tables there are depends on the teacher's signal; the vocabulary's side is in `vocab_parallel` and
`full_vocab`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from gkd.errors import DataError
from gkd.loss.divergence import DIVERGENCES, forward_kl, outcome_tables
from gkd.loss.policy_gradient import importance_weights, policy_gradient_loss
from gkd.loss.spec import LossSpec, LossTerm
from gkd.types import TokenTargets

_PLAIN = LossTerm("forward_kl")


@dataclass(slots=True)
class TokenLosses:
    """Losses and diagnostics of N tokens.

    `values` holds, without gradient, one [N] tensor a name: each term (unweighted; 0 on tokens it is not defined for)
    and the diagnostics

        token_kl             KL(teacher || student), whatever the loss; nats
        teacher_topk_mass    the teacher's probability on its list
        student_topk_mass    the student's on the same ids
        overlap              sum over the list of min(p, q): 1 - total variation where the list is everything
        student_entropy      nats
        importance_weight    after the clip, on-policy tokens
        importance_clipped   1 where the clip was used
    """

    total: Tensor  # [N] weighted sum of the terms, differentiable
    values: dict[str, Tensor] = field(default_factory=dict)


def report_names(spec: LossSpec, *, has_distribution: bool, has_topk: bool) -> tuple[str, ...]:
    """The names in `TokenLosses.values`, in a fixed order: the same on every rank, whatever rows it has."""
    names = [term.name for term in spec.terms]
    if has_distribution:
        names += ["token_kl", "overlap"]
    if has_topk:
        names += ["teacher_topk_mass", "student_topk_mass"]
    if spec.policy_gradients:
        names += ["importance_weight", "importance_clipped"]
    return tuple(dict.fromkeys([*names, "student_entropy"]))


def topk_losses(
    spec: LossSpec, targets: TokenTargets, student_topk: Tensor | None, student_sampled: Tensor, entropy: Tensor
) -> TokenLosses:
    """Losses where the teacher gave a top-k table, its logprob of the sampled token, or both.

    Args:
        student_topk: [N, K] nats, over the full vocabulary, of targets.topk_ids (anything where that is -1).
        student_sampled: [N] nats, of targets.sampled_ids.
        entropy: [N] nats, the student's.

    Raises:
        DataError: a term needs a table that `targets` lacks.
    """
    losses = sampled_losses(spec, targets, student_sampled, targets.sampled_logprobs)
    if student_topk is not None:
        if targets.topk_ids is None or targets.topk_logprobs is None:
            raise DataError("the loss has top-k logprobs of the student, and no top-k table of the teacher")
        listed = targets.topk_ids >= 0
        log_p = targets.topk_logprobs.to(student_topk.dtype)
        tables = outcome_tables(student_topk, log_p, spec.tail, listed=listed, tail_mass=targets.tail_mass)
        for term in spec.divergences:
            loss = DIVERGENCES[term.name](*tables, term)
            losses.total = losses.total + term.weight * loss
            losses.values[term.name] = loss.detach()
        with torch.no_grad():
            if "token_kl" not in losses.values:
                losses.values["token_kl"] = forward_kl(*tables, _PLAIN)
            p, q = log_p.exp().masked_fill(~listed, 0.0), student_topk.exp().masked_fill(~listed, 0.0)
            losses.values["teacher_topk_mass"] = p.sum(dim=-1)
            losses.values["student_topk_mass"] = q.sum(dim=-1)
            losses.values["overlap"] = torch.minimum(p, q).sum(dim=-1)
    elif spec.divergences:
        raise DataError("the loss compares distributions, and the teacher gave none")
    losses.values["student_entropy"] = entropy.detach()
    return losses


def sampled_losses(
    spec: LossSpec, targets: TokenTargets, student_sampled: Tensor, teacher_sampled: Tensor | None
) -> TokenLosses:
    """The terms that look at the sampled token alone: [N] logprobs of both -> their weighted sum."""
    losses = TokenLosses(torch.zeros_like(student_sampled))
    if spec.policy_gradients:
        if teacher_sampled is None:
            raise DataError("the loss needs the teacher's logprob of each sampled token, and the teacher gave none")
        weights, clipped = importance_weights(student_sampled, targets.rollout_logprobs, spec.importance_clip)
        losses.values["importance_weight"] = weights.masked_fill(~targets.on_policy, 0.0)
        losses.values["importance_clipped"] = (clipped & targets.on_policy).to(weights.dtype)
        for term in spec.policy_gradients:
            _add(
                losses,
                term,
                policy_gradient_loss(term.name, student_sampled, teacher_sampled, weights),
                targets.on_policy,
            )
    if spec.sft is not None:
        _add(losses, spec.sft, -student_sampled, ~targets.on_policy)
    return losses


def _add(losses: TokenLosses, term: LossTerm, loss: Tensor, where: Tensor) -> None:
    # A token of the other kind may hold anything, an infinity included; masked_fill keeps it out of the gradient, too.
    loss = loss.masked_fill(~where, 0.0)
    losses.total = losses.total + term.weight * loss
    losses.values[term.name] = loss.detach()
