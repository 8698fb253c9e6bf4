"""Megatron shards -> full tensors under HF names, one at a time: the source of every weight transfer.

Each pipeline stage exports its own tensors, in the order of `export_plan`, on all ranks of it that
`ParallelLayout.exports` names at once (the gathers are collectives). Tied embeddings are exported
once, padding rows never.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from gkd.actor.megatron.hf_mapping import Shape, TensorEntry, stage_entries
from gkd.actor.megatron.model import StudentModel


def export_plan(model: StudentModel) -> list[tuple[str, Shape, torch.dtype]]:
    """(HF name, shape, dtype) of what `iter_hf_tensors` yields on this stage, in its order; moves no data."""
    params = dict(model.named_params())
    return [
        (name, shape, params[entry.param].dtype)
        for entry in stage_entries(model.dims, model.layout)
        if entry.exported
        for name, shape in zip(entry.hf_names, entry.hf_shapes, strict=True)
    ]


@torch.no_grad()
def iter_hf_tensors(
    model: StudentModel, *, value: Callable[[torch.nn.Parameter], Tensor] = lambda param: param.data
) -> Iterator[tuple[str, Tensor]]:
    """Yields (HF name, full tensor) of this pipeline stage.

    Collective over the TP group, and with experts over the EP group: every rank of them must run the iterator to its
    end. One Megatron parameter is gathered at a time, and one expert's is one; where its parts are not one below the
    other in HF's order, there is a second copy of it for a moment. A tensor may alias the live weights, so consume or
    copy it before the next training step.

    Args:
        model: this rank's stage.
        value: what of a parameter to export, of the parameter's shape; its gradient, say.
    """
    params = dict(model.named_params())
    for entry in stage_entries(model.dims, model.layout):
        if not entry.exported:
            continue
        # No name for the gathered tensors: it would keep them alive while the next ones are gathered.
        yield from zip(entry.hf_names, _hf_tensors(entry, value(params[entry.param]), model), strict=True)


def _hf_tensors(entry: TensorEntry, shard: Tensor, model: StudentModel) -> tuple[Tensor, ...]:
    shards = _gather(shard, model) if entry.owner is None else _from_owner(shard, entry.owner, model)
    return entry.layout.join(shards, model.dims)


def _gather(shard: Tensor, model: StudentModel) -> Tensor:
    """[tp, *shape] this tensor's shards of all TP ranks, on every one of them."""
    if model.layout.tp == 1:
        return shard[None]
    shards = shard.new_empty((model.layout.tp, *shard.shape))
    dist.all_gather_into_tensor(shards, shard.contiguous()[None], group=model.groups.tp)
    return shards


def _from_owner(mine: Tensor, owner: int, model: StudentModel) -> Tensor:
    """[1, *shape] the expert's tensor of EP rank `owner`, on every rank of the EP group; `mine` gives the shape."""
    if model.layout.ep == 1:
        return mine[None]
    tensor = (
        mine.contiguous()
        if owner == model.layout.ep_rank
        else torch.empty_like(mine, memory_format=torch.contiguous_format)
    )
    dist.broadcast(tensor, src=dist.get_global_rank(model.groups.ep, owner), group=model.groups.ep)
    return tensor[None]
