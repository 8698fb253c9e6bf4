"""Put the offloaded shards of a rank into one pinned block of host memory.

fully_shard pins each shard separately, and torch rounds each pinned allocation up to a power of two: a 7B model in
bfloat16 would take 27 GiB instead of 14. One allocation of the exact size, registered with CUDA in place, has no such
overhead. Depends on the private names of torch 2.11 to 2.13: it replaces the memory of fully_shard's internal records.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from gkd.actor.common.torch_versions import param_groups
from gkd.memory.page_lock import page_lock

_ALIGN = 64  # bytes; a multiple of every item size
# Memory must not be freed while CUDA has it pinned; an actor's models live as long as its process.
_PINNED: list[Tensor] = []


@torch.no_grad()
def into_one_block(root: nn.Module, *, pinned: bool) -> Tensor:
    """Move the shards of a model, with their values, into one block of memory. Call it before any forward pass.

    Args:
        root: its FSDP modules have their shards in host memory, unpinned.
        pinned: pin the block, so that copies to a GPU are asynchronous. It is never freed.

    Returns:
        The block, [n] uint8.

    Raises:
        MemoryError: not enough memory can be pinned.
        RuntimeError: not enough memory.
    """
    modules = [module for module in root.modules() if isinstance(module, FSDPModule)]
    groups = [group for module in modules for group in param_groups(module)]
    shards: list[Any] = [shard for group in groups for shard in group.fsdp_params]
    n_bytes = [-(-shard._sharded_param_data.nbytes // _ALIGN) * _ALIGN for shard in shards]
    block = torch.empty(sum(n_bytes), dtype=torch.uint8)
    if pinned and block.numel():
        page_lock(block)
        _PINNED.append(block)
    at = 0
    for shard, size in zip(shards, n_bytes, strict=True):
        old, local = shard._sharded_param_data, shard.sharded_param._local_tensor
        new = block[at : at + old.nbytes].view(old.dtype)
        new.copy_(old)
        # Like `FSDPParam.reset_sharded_param`: padding rows at the end are only in the record.
        shard._sharded_param_data = new
        shard.sharded_param._local_tensor = new[: prod(local.shape)].view(local.shape)
        shard.pin_memory = pinned
        at += size
    return block
