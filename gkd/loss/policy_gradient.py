"""Estimate the reverse KL from the sampled token: k1, k2, k3, and a surrogate with the exact gradient.

With y ~ mu (the rollout engine's distribution), q the student, p the teacher, rho = q(y) / mu(y):

    k1 = log q - log p          unbiased, high variance, may be negative
    k2 = (log q - log p)^2 / 2  biased, low variance
    k3 = p/q - 1 - log(p/q)     unbiased, never negative, low variance while p and q are close

(http://joschu.net/blog/kl-approx.html.) These are estimators of the *value*. Differentiating them for a fixed
sample is not enough: the gradient of k1 then has mean zero, and that of k3 has the mean of the *forward*
KL's gradient. The gradient of the reverse KL is E_q[(log q - log p) grad log q]. k1 by the score function,
k2 by differentiation, and k3 by both (the product rule on q * k3) all give it, sample by sample. So the
surrogate has the value rho * k_i and, for every name, the gradient rho * k1 * grad log q. The names differ
only in the number that is reported.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def log_importance_weights(actor_logprobs: Tensor, rollout_logprobs: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """Return log rho of each token, rho = q(y) / mu(y), limited to log `clip`, and where the limit applies.

    Args:
        actor_logprobs: [N] nats, of the current weights.
        rollout_logprobs: [N] nats, recorded by the engine when it sampled.
        clip: largest weight (truncated importance sampling); 0 = no limit.

    Returns:
        [N] nats, without gradient, and [N] bool.
    """
    log_weights = (actor_logprobs - rollout_logprobs.to(actor_logprobs.dtype)).detach()
    if clip == 0:
        return log_weights, torch.zeros_like(log_weights, dtype=torch.bool)
    return log_weights.clamp(max=math.log(clip)), log_weights > math.log(clip)


def reverse_kl_estimate(name: str, actor_logprobs: Tensor, teacher_logprobs: Tensor) -> Tensor:
    """Return k1, k2 or k3 of each token: [N] and [N] -> [N], nats."""
    log_ratio = teacher_logprobs.to(actor_logprobs.dtype) - actor_logprobs  # log p/q
    if name == "k1":
        return -log_ratio
    if name == "k2":
        return log_ratio.square() / 2
    assert name == "k3", name
    return torch.expm1(log_ratio) - log_ratio


def surrogate(actor_logprobs: Tensor, *, value: Tensor, slope: Tensor) -> Tensor:
    """Return [N] losses that equal `value` and have the gradient `slope` in `actor_logprobs`; both are constants."""
    return value.detach() + slope.detach() * (actor_logprobs - actor_logprobs.detach())


def tail_residual(
    actor_logprobs: Tensor, teacher_logprobs: Tensor, tail_log_ratio: Tensor, log_weights: Tensor
) -> Tensor:
    """Return what the bucket of a reverse KL lacks, estimated from a token outside the list: [N] -> [N], nats.

    The bucket gives every token of the tail the same log ratio r_t = log q_t - log p_t. With its own, r_y, value and
    gradient are exact: the mean over y ~ mu of rho 1[y outside] (r_y - r_t) is the missing value, and with
    grad log q(y) the missing gradient (docs/losses.md).

    Args:
        tail_log_ratio: [N] r_t.
        log_weights: [N] log rho.
    """
    slope = log_weights.exp() * (actor_logprobs.detach() - teacher_logprobs - tail_log_ratio)
    return surrogate(actor_logprobs, value=slope, slope=slope)


def policy_gradient_loss(name: str, actor_logprobs: Tensor, teacher_logprobs: Tensor, log_weights: Tensor) -> Tensor:
    """Return rho * k_i of each token with the gradient of the reverse KL; see the module. [N] -> [N], nats."""
    frozen = actor_logprobs.detach()
    weights = log_weights.exp()
    slope = weights * reverse_kl_estimate("k1", frozen, teacher_logprobs)
    if name == "k3":
        # rho p/q as one exponential: for a tiny q, p/q overflows, but rho p/q = p/mu does not.
        log_ratio = teacher_logprobs.to(frozen.dtype) - frozen
        value = (log_weights + log_ratio).exp() - weights + slope
    else:
        value = weights * reverse_kl_estimate(name, frozen, teacher_logprobs)
    return surrogate(actor_logprobs, value=value, slope=slope)


def scaled_teacher(teacher_logprobs: Tensor, reference_logprobs: Tensor | None, scale: float) -> Tensor:
    """Return log r + scale (log p - log r) of each token, [N] nats: what k1-k3 compare the student with.

    So k1's gradient is that of G-OPD's reward scale (log p - log r) - (log q - log r), arXiv:2602.12125. The sum over
    the vocabulary is 1 only for a scale of 0 or 1.

    Args:
        reference_logprobs: [N] nats; None: the scale is 1.
    """
    if reference_logprobs is None or scale == 1:
        return teacher_logprobs
    reference = reference_logprobs.to(teacher_logprobs.dtype)
    return reference + scale * (teacher_logprobs - reference)


# The clipped policy-gradient loss of the rewards: PPO's surrogate, arXiv:1707.06347, equation 7.


def clipped_policy_loss(
    actor_logprobs: Tensor, rollout_logprobs: Tensor, advantages: Tensor, clip: tuple[float, float]
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute -min(rho A, clip(rho, 1 - low, 1 + high) A) of each token, rho = q(y) / mu(y).

    Where the limit applies the gradient is 0, so tokens whose probability has already changed by more than the limit,
    in the direction that the advantage demands, are not moved further. Elsewhere it is -rho A grad log q(y).

    Args:
        actor_logprobs: [N] nats, of the current weights.
        rollout_logprobs: [N] nats, recorded by the engine when it sampled.
        advantages: [N] of each token's response.
        clip: (low, high).

    Returns:
        Losses [N], and without gradient rho [N] and where the limit applies, [N] bool.
    """
    ratio = (actor_logprobs - rollout_logprobs.to(actor_logprobs.dtype)).exp()
    advantages = advantages.to(ratio.dtype)
    plain = ratio * advantages
    limited = ratio.clamp(1 - clip[0], 1 + clip[1]) * advantages
    return -torch.minimum(plain, limited), ratio.detach(), (limited < plain).detach()
