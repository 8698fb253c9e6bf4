"""Run AdamW on sharded parameters: global gradient norm, clipping, learning rate."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from gkd.actor.common.optim_spec import OptimSpec
from gkd.actor.common.step import total_norm


def build_adamw(params: Iterable[nn.Parameter], spec: OptimSpec) -> torch.optim.AdamW:
    """Return torch's AdamW with no weight decay on vectors (norms and biases).

    It is fused: one pass over memory for the whole update, on CUDA and on the CPU, where it uses all threads.
    """
    trained = list(params)
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": spec.weight_decay},
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=spec.lr,
        betas=(spec.betas[0], spec.betas[1]),
        eps=spec.eps,
        fused=True,
    )


@torch.no_grad()
def global_grad_norm(params: Sequence[nn.Parameter], device: torch.device) -> float:
    """Return the norm over all ranks' shards, summed in float64. Collective over the world."""
    total = total_norm(local_grads(params)).square().to(device)
    dist.all_reduce(total)
    return float(total.sqrt())


@torch.no_grad()
def scale_grads(params: Sequence[nn.Parameter], factor: float) -> None:
    """Multiply all gradients by `factor` in place."""
    torch._foreach_mul_(local_grads(params), factor)


def threads_per_rank() -> int:
    """Return this host's cores divided by the number of ranks on it. Collective over the world."""
    hosts: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(hosts, socket.gethostname())
    return max(1, len(os.sched_getaffinity(0)) // hosts.count(socket.gethostname()))


@contextmanager
def host_threads(n: int) -> Iterator[None]:
    """Within the block, let torch use `n` CPU threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def local_grads(params: Sequence[nn.Parameter]) -> list[Tensor]:
    """Return this rank's shard of every existing gradient."""
    grads = (param.grad for param in params)
    return [grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads if grad is not None]
