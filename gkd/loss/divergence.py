"""Compute divergences between teacher and student over a table of outcomes: [N, M] and [N, M] -> [N].

Plain autograd, so the gradient is that of the loss as it is written here. P is the teacher, Q the student.
The outcomes are the whole vocabulary, or the teacher's top-k ids with the rest treated according to `tail`.
The teacher's logprobs are normalized over the full vocabulary before the truncation to K, so their mass
m_p = sum_k p_k is below 1:

    bucket   one more outcome, "any other token", with 1 - m_p (teacher) and 1 - m_q (student)
    renorm   both distributions are renormalized over the K ids
    drop     only the K ids; a sum may be negative, and the gradient of the forward KL in the logits is
             m_p * q - p on the K ids, not q - p
    residual the outcomes of bucket; `gkd.loss.policy_gradient.tail_residual` adds the correction

Every divergence is a sum over outcomes, so it can be summed over parts of a vocabulary. Over a whole vocabulary
training uses the same divergences with gradients in closed form (`divergence_slopes.py`). CONTRIBUTING.md has the
recipe for another one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from gkd.config.loss_spec import DIVERGENCE_NAMES, LossTerm, Tail
from gkd.errors import ConfigError
from gkd.user_code import import_function

Divergence: TypeAlias = Callable[[Tensor, Tensor, LossTerm], Tensor]


def forward_kl(log_q: Tensor, log_p: Tensor, term: LossTerm) -> Tensor:
    """Return KL(P || Q) = sum p (log p - log q), nats. arXiv:2306.13649, Eq. 1."""
    return _x_log_ratio(log_p, log_q).sum(dim=-1)


def reverse_kl(log_q: Tensor, log_p: Tensor, term: LossTerm) -> Tensor:
    """Return KL(Q || P); infinite where the student has mass on a token to which the teacher gives probability 0."""
    return _x_log_ratio(log_q, log_p).sum(dim=-1)


def jsd(log_q: Tensor, log_p: Tensor, term: LossTerm) -> Tensor:
    """Return beta KL(P || M) + (1 - beta) KL(Q || M), M = beta P + (1 - beta) Q. arXiv:2306.13649.

    Divided by beta it tends to KL(P || Q) as beta -> 0, and divided by 1 - beta to KL(Q || P) as beta -> 1.
    """
    log_m = _log_mixture(log_p, log_q, term.beta)
    teacher = _x_log_ratio(log_p, log_m)
    student = _x_log_ratio(log_q, log_m)
    return (term.beta * teacher + (1.0 - term.beta) * student).sum(dim=-1)


def skew_kl(log_q: Tensor, log_p: Tensor, term: LossTerm) -> Tensor:
    """Return KL(P || alpha P + (1 - alpha) Q). DistiLLM, arXiv:2402.03898."""
    return _x_log_ratio(log_p, _log_mixture(log_p, log_q, term.alpha)).sum(dim=-1)


def skew_reverse_kl(log_q: Tensor, log_p: Tensor, term: LossTerm) -> Tensor:
    """Return KL(Q || (1 - alpha) P + alpha Q). DistiLLM, arXiv:2402.03898."""
    return _x_log_ratio(log_q, _log_mixture(log_q, log_p, term.alpha)).sum(dim=-1)


DIVERGENCES: dict[str, Divergence] = {name: globals()[name] for name in DIVERGENCE_NAMES}
IMPOSSIBLE = -1e4  # nats; what the functions of a user get for a logprob of -inf. Its probability is 0 in every dtype.


def divergence_of(name: str) -> Divergence:
    """Return the function of a built-in name or of an import path. Raises ConfigError: it cannot be imported."""
    if name in DIVERGENCES:
        return DIVERGENCES[name]
    try:
        function = import_function(name)
    except ImportError as error:
        fix = "name a function of a module that the folder of the start or PYTHONPATH has, on each host."
        raise ConfigError("distill.loss", name, f"{error}.", fix) from error
    # Finite, so that 0 * inf occurs in no formula. The slope of a clamped entry is 0.
    return lambda log_q, log_p, term: function(log_q.clamp(min=IMPOSSIBLE), log_p.clamp(min=IMPOSSIBLE), term)


def outcome_tables(
    log_q: Tensor,
    log_p: Tensor,
    tail: Tail,
    *,
    listed: Tensor | None = None,
    log_q_tail: Tensor | None = None,
    tail_mass: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the outcome tables (student's, teacher's) of top-k logprobs for the divergences, both [N, M].

    Args:
        log_q: [N, K] float32 or float64, nats, the student's logprobs over the full vocabulary.
        log_p: [N, K] the teacher's, likewise; -inf = impossible.
        tail: how to treat the rest; M is K + 1 for bucket, else K.
        listed: [N, K] bool, False for padding entries; None: all entries are real.
        log_q_tail: [N] the student's logprob of all tokens outside the list, used by bucket; -inf: there are none.
            None: computed as 1 - sum of the list, which has no significant digit if the list holds nearly all mass.
        tail_mass: [N] the teacher's probability outside the list, used by bucket; None: 1 - sum of the list. Floored
            at the machine epsilon, which is about where the fp16 wire format rounds to 0.

    With bucket, the teacher's K + 1 probabilities are scaled to sum to 1. The wire format rounds them, and a
    divergence of probabilities that do not sum to 1 may be negative.
    """
    log_p = log_p.to(log_q.dtype)
    if listed is not None:  # padding is not an outcome: no mass on either side, and no gradient
        log_q = log_q.masked_fill(~listed, -torch.inf)
        log_p = log_p.masked_fill(~listed, -torch.inf)
    if tail == "renorm":
        return log_q.log_softmax(dim=-1), log_p.log_softmax(dim=-1)
    if tail == "drop":
        return log_q, log_p
    eps = torch.finfo(log_q.dtype).eps  # as in `tail_logprob`: both sides agree if the list is the whole vocabulary
    outside = tail_logprob(log_p) if tail_mass is None else tail_mass.to(log_q.dtype).clamp(min=eps).log()
    if log_q_tail is None:
        log_q_tail = tail_logprob(log_q)
    else:  # a list of the whole vocabulary leaves no tail
        outside = outside.masked_fill(log_q_tail == -torch.inf, -torch.inf)
    log_p = torch.cat([log_p, outside[:, None]], dim=-1)
    return torch.cat([log_q, log_q_tail[:, None]], dim=-1), log_p.log_softmax(dim=-1)


def tail_logprob(topk_logprobs: Tensor) -> Tensor:
    """Return log(1 - sum_k exp(logprob_k)), the log mass outside the K ids. [N, K] -> [N].

    The mass is floored at the dtype's machine epsilon: 1 - sum_k has that absolute error anyway (it can
    even be negative). Below the floor the gradient is zero.
    """
    mass = topk_logprobs.exp().sum(dim=-1)
    return torch.log1p(-mass.clamp(max=1.0 - torch.finfo(mass.dtype).eps))


def _x_log_ratio(log_x: Tensor, log_y: Tensor) -> Tensor:
    """Return x (log x - log y), elementwise, with 0 log 0 = 0."""
    # An entry of -inf, or one too small for the dtype, could give 0 * inf = nan in the value and in the gradient.
    x = log_x.exp()
    absent = x == 0
    return x * (log_x.masked_fill(absent, 0.0) - log_y.masked_fill(absent, 0.0))


def _log_mixture(log_a: Tensor, log_b: Tensor, share_a: float) -> Tensor:
    """Return log(share_a * a + (1 - share_a) * b), elementwise."""
    if share_a == 0:
        return log_b
    absent = torch.isneginf(log_a) & torch.isneginf(log_b)
    a = log_a.masked_fill(absent, 0.0)
    b = log_b.masked_fill(absent, 0.0)
    return torch.logaddexp(a + math.log(share_a), b + math.log1p(-share_a)).masked_fill(absent, -torch.inf)
