"""AdamW over sharded parameters: gradients become a token mean, their global norm is taken, then the step is made."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from gkd.actor.optim_spec import OptimSpec


def build_adamw(params: Iterable[nn.Parameter], spec: OptimSpec, device: torch.device) -> torch.optim.AdamW:
    """torch's AdamW; norms and biases, that is vectors, without weight decay.

    Args:
        device: where the shards are; CUDA has one kernel for the whole update.
    """
    trained = list(params)
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": spec.weight_decay},
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
    ]
    is_cuda = device.type == "cuda"
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=spec.lr,
        betas=spec.betas,
        eps=spec.eps,
        fused=is_cuda,
        foreach=not is_cuda,
    )


@torch.no_grad()
def global_grad_norm(params: Sequence[nn.Parameter], device: torch.device) -> float:
    """Of all ranks' shards together; summed in float64. Collective over the world."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    for grad in local_grads(params):
        total += torch.linalg.vector_norm(grad).double().to(device) ** 2
    dist.all_reduce(total)
    return float(total.sqrt())


@torch.no_grad()
def scale_grads(params: Sequence[nn.Parameter], factor: float) -> None:
    torch._foreach_mul_(local_grads(params), factor)


def clip_factor(grad_norm: float, clip_grad: float) -> float:
    """What brings a norm down to `clip_grad`; 1 below it, and where clipping is off (0)."""
    return min(1.0, clip_grad / (grad_norm + 1e-6)) if clip_grad > 0 else 1.0


def local_grads(params: Sequence[nn.Parameter]) -> list[Tensor]:
    """This rank's part of every gradient there is."""
    grads = (param.grad for param in params)
    return [grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads if grad is not None]
