"""Compute the divergences of `divergence.py` and their slopes in closed form, for rows over a whole vocabulary.

A top-k table is small, and autograd differentiates it. Over a vocabulary, autograd would keep about ten
tensors of the rows' size; these functions need two or three. Each returns, for [n, v] logprobs,

    value [n]      sum_v f(log p_v, log q_v)
    slope [n, v]   d f / d log q_v

A probability that is zero, or too small for its dtype, contributes nothing. A divergence without a function here is
differentiated by autograd, piece by piece, as those of the user are: exact, but slower.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from gkd.config.loss_spec import LossTerm
from gkd.loss.divergence import Divergence, divergence_of

ValueAndSlope: TypeAlias = Callable[[Tensor, Tensor, LossTerm], tuple[Tensor, Tensor]]


def forward_kl(log_q: Tensor, log_p: Tensor, term: LossTerm) -> tuple[Tensor, Tensor]:
    p = log_p.exp()
    return _parts(p, log_p, log_q).sum(dim=-1), p.neg_()


def reverse_kl(log_q: Tensor, log_p: Tensor, term: LossTerm) -> tuple[Tensor, Tensor]:
    q = log_q.exp()
    pointwise = _parts(q, log_q, log_p)
    return pointwise.sum(dim=-1), pointwise.add_(q)


def jsd(log_q: Tensor, log_p: Tensor, term: LossTerm) -> tuple[Tensor, Tensor]:
    # The derivatives through log m cancel in the sum of the two parts.
    p = log_p.exp()
    q = log_q.exp()
    beta = term.beta
    log_m = _log(torch.lerp(q, p, beta))
    teacher = _parts(p, log_p, log_m).sum(dim=-1)
    student = _parts(q, log_q, log_m)
    return beta * teacher + (1.0 - beta) * student.sum(dim=-1), student.mul_(1.0 - beta)


def skew_kl(log_q: Tensor, log_p: Tensor, term: LossTerm) -> tuple[Tensor, Tensor]:
    if term.alpha == 0:  # the mixture is q, which may underflow although log q is finite
        return forward_kl(log_q, log_p, term)
    p = log_p.exp()
    q = log_q.exp()
    log_m = _log(torch.lerp(q, p, term.alpha))
    share = (log_q - log_m).exp_()  # q / m
    return _parts(p, log_p, log_m).sum(dim=-1), share.mul_(p).mul_(term.alpha - 1.0)


def skew_reverse_kl(log_q: Tensor, log_p: Tensor, term: LossTerm) -> tuple[Tensor, Tensor]:
    if term.alpha == 0:
        return reverse_kl(log_q, log_p, term)
    p = log_p.exp()
    q = log_q.exp()
    log_m = _log(torch.lerp(p, q, term.alpha))
    pointwise = _parts(q, log_q, log_m)
    share = (log_q - log_m).exp_()
    return pointwise.sum(dim=-1), pointwise.add_(q.mul_(1.0 - term.alpha * share))


SLOPES: dict[str, ValueAndSlope] = {
    function.__name__: function for function in (forward_kl, reverse_kl, jsd, skew_kl, skew_reverse_kl)
}


def value_and_slope(name: str) -> ValueAndSlope:
    """Return the function of a divergence: its closed form, or autograd's derivative if it has none."""
    return SLOPES.get(name) or partial(_by_autograd, divergence_of(name))


def _by_autograd(divergence: Divergence, log_q: Tensor, log_p: Tensor, term: LossTerm) -> tuple[Tensor, Tensor]:
    log_q = log_q.detach().requires_grad_()
    with torch.enable_grad():  # the loss runs inside the forward pass of a Function, where gradients are off
        value = divergence(log_q, log_p, term)
        (slope,) = torch.autograd.grad(value.sum(), log_q)
    return value.detach(), slope


def _parts(x: Tensor, log_x: Tensor, log_y: Tensor) -> Tensor:
    """Return x (log x - log y), elementwise, with 0 log 0 = 0."""
    pointwise = (log_x - log_y).mul_(x)
    return pointwise.masked_fill_(x == 0, 0.0)  # may be 0 * inf there


def _log(m: Tensor) -> Tensor:
    """Compute log m in place. If both parts of a mixture underflow to 0, any finite number is correct."""
    return m.clamp_(min=torch.finfo(m.dtype).tiny).log_()
