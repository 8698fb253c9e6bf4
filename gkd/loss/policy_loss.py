"""The clipped policy-gradient loss of the rewards: PPO's surrogate, arXiv:1707.06347, equation 7."""

from __future__ import annotations

import torch
from torch import Tensor


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
    plain, limited = ratio * advantages, ratio.clamp(1 - clip[0], 1 + clip[1]) * advantages
    return -torch.minimum(plain, limited), ratio.detach(), (limited < plain).detach()
