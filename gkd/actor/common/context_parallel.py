"""Exchange columns for heads among the ranks of a context-parallel group, so that attention sees whole sequences.

One all-to-all before attention gives each rank all columns of heads / cp heads, and one afterwards its own columns of
all heads (Ulysses, arXiv:2309.14509). Every rank then has the same share of the causal scores, whatever the lengths of
the sequences. `gkd.data.columns` defines the columns of each rank.

Letters: B rows, S columns, s = S / cp columns of a rank, D head size.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def all_columns(q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """Exchange this rank's columns of all heads for all columns of this rank's heads, in one all-to-all.

    Args:
        q: [B, heads, s, D]; the group's size divides heads.
        k, v: [B, kv_heads, s, D], D of its own. The size divides kv_heads, or is a multiple: then several ranks get the
            same head.

    Returns:
        The same tensors as [B, heads / cp, S, D].
    """
    n = group.size()
    copies = max(1, n // k.shape[1])
    k, v = (tensor[:, :, None].expand(-1, -1, copies, -1, -1).flatten(1, 2) for tensor in (k, v))
    # [s, B, heads, D] -> [cp, s, B, heads / cp, D] -> [cp, s, B, heads / cp * D]
    chunks = [tensor.permute(2, 0, 1, 3).unflatten(2, (n, -1)).movedim(2, 0).flatten(3) for tensor in (q, k, v)]
    received = _AllToAll.apply(torch.cat(chunks, dim=3), group).flatten(0, 1)  # [S, B, numbers of this rank's heads]
    of_heads = zip(received.split([part.shape[3] for part in chunks], dim=2), (q, k, v), strict=True)
    return [mine.unflatten(2, (-1, tensor.shape[3])).permute(1, 2, 0, 3) for mine, tensor in of_heads]


def own_columns(context: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Exchange all columns of this rank's heads for its columns of all: [B, heads / cp, S, D] -> [B, heads, s, D]."""
    chunks = context.permute(2, 0, 1, 3).unflatten(0, (group.size(), -1))
    received: Tensor = _AllToAll.apply(chunks, group)  # [cp, s, B, heads / cp, D]
    return received.movedim(0, 2).flatten(2, 3).permute(1, 2, 0, 3)


class _AllToAll(torch.autograd.Function):
    """Send part i of [cp, ...] to rank i, and return the parts received, in rank order. Its gradient does the same."""

    @staticmethod
    def forward(ctx: Any, chunks: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        chunks = chunks.contiguous()
        received = torch.empty_like(chunks)
        dist.all_to_all_single(received, chunks, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _AllToAll.apply(grads[0], ctx.group), None
