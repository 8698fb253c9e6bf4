"""Megatron shards -> full tensors under HF names, one at a time: the source of every weight transfer.

Each pipeline stage exports its own tensors, in the order of `export_plan`, on all its TP ranks at
once (the gather is a collective). Tied embeddings are exported once, padding rows never.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from gkd.actor.megatron.hf_mapping import Shape, stage_entries
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

    Collective over the TP group: every rank of it must run the iterator to its end. At most one
    Megatron parameter, gathered, is alive at a time; a tensor may alias the live weights (TP = 1),
    so consume or copy it before the next training step.

    Args:
        model: this rank's stage.
        value: what of a parameter to export, of the parameter's shape; its gradient, say.
    """
    params = dict(model.named_params())
    for entry in stage_entries(model.dims, model.layout):
        if not entry.exported:
            continue
        shards = _gather(value(params[entry.param]), model)
        yield from zip(entry.hf_names, entry.layout.join(shards, model.dims), strict=True)


def _gather(shard: Tensor, model: StudentModel) -> list[Tensor]:
    """This tensor's shards of all TP ranks, in rank order, on every one of them."""
    if model.layout.tp == 1:
        return [shard]
    shards = [torch.empty_like(shard, memory_format=torch.contiguous_format) for _ in range(model.layout.tp)]
    dist.all_gather(shards, shard.contiguous(), group=model.groups.tp)
    return shards
