"""The shards that a rank keeps in host memory, in one run of bytes that is pinned where it lies.

fully_shard would pin each shard on its own, and torch rounds each piece of pinned memory up to a power of two: in
bfloat16 a 7B model would take 27 GiB instead of 14. One allocation of the right size, registered with CUDA as it is,
takes no more than its bytes. Tied to torch 2.13: it gives fully_shard's own records other memory.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.cuda._pin_memory_utils import pin_memory
from torch.distributed.fsdp import FSDPModule

from gkd.memory.oom import PINNED

_ALIGN = 64  # bytes; a multiple of every item size
# Memory may not be freed while CUDA has it pinned; an actor's models live as long as its process.
_PINNED: list[Tensor] = []


@torch.no_grad()
def into_one_run(root: nn.Module, *, pinned: bool) -> Tensor:
    """Moves the shards of a model, with what they hold, to where they follow one another; before any forward pass.

    Args:
        root: its FSDP modules have their shards in host memory, unpinned.
        pinned: copies to a GPU may run beside it. For good: the memory is never given back.

    Returns:
        The run, [n] uint8.

    Raises:
        MemoryError: there is not so much memory that can be pinned.
        RuntimeError: the memory is not there.
    """
    modules = [module for module in root.modules() if isinstance(module, FSDPModule)]
    groups = [group for module in modules for group in module._get_fsdp_state()._fsdp_param_groups]
    shards: list[Any] = [shard for group in groups for shard in group.fsdp_params]
    n_bytes = [-(-shard._sharded_param_data.nbytes // _ALIGN) * _ALIGN for shard in shards]
    run = torch.empty(sum(n_bytes), dtype=torch.uint8)
    if pinned and run.numel():
        _pin(run)
    at = 0
    for shard, size in zip(shards, n_bytes, strict=True):
        old, local = shard._sharded_param_data, shard.sharded_param._local_tensor
        new = run[at : at + old.nbytes].view(old.dtype)
        new.copy_(old)
        # As `FSDPParam.reset_sharded_param` does: rows of padding at the end are the record's alone.
        shard._sharded_param_data = new
        shard.sharded_param._local_tensor = new[: prod(local.shape)].view(local.shape)
        shard.pin_memory = pinned
        at += size
    return run


def _pin(run: Tensor) -> None:
    """Raises MemoryError: CUDA cannot pin so much; its own words would be taken for another error."""
    try:
        pin_memory(run.data_ptr(), run.nbytes)
    except RuntimeError as error:
        raise MemoryError(f"Unable to allocate {run.nbytes} bytes of {PINNED} (in one run; {error})") from error
    _PINNED.append(run)
