"""Divergences between teacher and student on the teacher's top-k ids: [N, K] and [N, K] -> [N].

Plain autograd, so the gradient is that of the loss as it is written here. The teacher's logprobs
are normalised over the full vocabulary before the truncation to K, so their mass
m_p = sum_k p_k is below 1; what happens to the rest is the policy `tail`:

    bucket   one more outcome, "any other token", with 1 - m_p (teacher) and 1 - m_q (student)
    renorm   both distributions are renormalised over the K ids
    drop     the sum over the K ids alone; may be negative, and its gradient in the logits is
             m_p * q - p on the K ids, not q - p

A further divergence is a function of this signature and a line in `DIVERGENCES`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from gkd.errors import ConfigError

Tail: TypeAlias = Literal["bucket", "renorm", "drop"]
Divergence: TypeAlias = Callable[[Tensor, Tensor, Tail], Tensor]


def forward_kl(topk_logprobs_student: Tensor, topk_logprobs_teacher: Tensor, tail: Tail) -> Tensor:
    """KL(teacher || student) per token, sum_k p_k (log p_k - log q_k), with the policy `tail`.

    Args:
        topk_logprobs_student: [N, K] float32 or float64, nats, log q over the full vocabulary.
        topk_logprobs_teacher: [N, K] like it, log p; -inf entries have no weight.
        tail: what stands for the tokens outside the K ids.

    Returns:
        [N] nats.

    Raises:
        ConfigError: unknown tail policy.

    Source: arXiv:2306.13649, Eq. 1, with the truncation made explicit.
    """
    log_q, log_p = topk_logprobs_student, topk_logprobs_teacher.to(topk_logprobs_student.dtype)
    if tail == "renorm":
        return _kl_terms(log_p.log_softmax(dim=-1), log_q.log_softmax(dim=-1)).sum(dim=-1)
    inside = _kl_terms(log_p, log_q).sum(dim=-1)
    if tail == "drop":
        return inside
    if tail == "bucket":
        return inside + _kl_terms(tail_logprob(log_p), tail_logprob(log_q))
    raise ConfigError("distill.tail", tail, "is not a tail policy.", f"Choose one of {', '.join(get_args(Tail))}.")


DIVERGENCES: dict[str, Divergence] = {"forward_kl": forward_kl}


def divergence_named(name: str) -> Divergence:
    """The divergence called `name`. Raises ConfigError naming `distill.loss` and the known ones."""
    if name not in DIVERGENCES:
        raise ConfigError("distill.loss", name, "is not a known loss.", f"Choose one of {', '.join(DIVERGENCES)}.")
    return DIVERGENCES[name]


def tail_logprob(topk_logprobs: Tensor) -> Tensor:
    """log(1 - sum_k exp(logprob_k)): the log mass outside the K ids. [N, K] -> [N].

    The mass is floored at the dtype's machine epsilon: 1 - sum_k has that absolute error anyway
    (it can even be negative), and below the floor there is no signal, so the gradient is zero.
    """
    mass = topk_logprobs.exp().sum(dim=-1)
    return torch.log1p(-mass.clamp(max=1.0 - torch.finfo(mass.dtype).eps))


def _kl_terms(log_p: Tensor, log_q: Tensor) -> Tensor:
    """p (log p - log q), elementwise, with 0 log 0 = 0."""
    # A teacher entry of -inf would give 0 * inf = nan in the value and in the gradient of log_q.
    absent = torch.isneginf(log_p)
    difference = log_p.masked_fill(absent, 0.0) - log_q.masked_fill(absent, 0.0)
    return log_p.exp() * difference
