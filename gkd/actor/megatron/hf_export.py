"""Gather Megatron shards into full tensors under HF names, one at a time, for weight transfer and saving.

Each pipeline stage exports its own tensors in the order of `export_plan`. The gathers are collectives of the ranks
for which `ParallelLayout.exports` is true. Tied embeddings are exported once, without padding rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from gkd.actor.common.lora import merge
from gkd.actor.megatron.hf_mapping import Shape, TensorEntry, stage_entries
from gkd.actor.megatron.lora import Adapter
from gkd.actor.megatron.model import StudentModel
from gkd.weight_sync.buckets import Content


def export_plan(model: StudentModel, content: Content = "merged") -> list[tuple[str, Shape, torch.dtype]]:
    """Return (HF name, shape, dtype) of what `iter_hf_tensors` yields on this stage, in its order. Moves no data."""
    params = dict(model.named_params())
    return [
        (name, shape, params[entry.param].dtype)
        for entry in _entries(model, content)
        if entry.exported
        for name, shape in zip(entry.hf_names, entry.hf_shapes, strict=True)
    ]


def _entries(model: StudentModel, content: Content) -> list[TensorEntry]:
    if content == "adapters":
        return [entry for adapter in model.adapters for entry in (adapter.a, adapter.b)]
    return stage_entries(model.dims, model.layout)


@torch.no_grad()
def iter_hf_tensors(model: StudentModel, content: Content = "merged") -> Iterator[tuple[str, Tensor]]:
    """Yield (HF name, full tensor) of this pipeline stage; see `iter_full`."""
    adapters = {adapter.weight: adapter for adapter in model.adapters} if content == "merged" else {}
    for name, tensor in iter_full(model, _entries(model, content)):
        adapter = adapters.get(name)
        yield name, tensor if adapter is None else _merged(tensor, adapter, model)
        del tensor  # it would be kept while the next one is gathered


def _merged(weight: Tensor, adapter: Adapter, model: StudentModel) -> Tensor:
    assert model.lora is not None
    (_, a), (_, b) = iter_full(model, [adapter.a, adapter.b])
    return merge(weight, a, b, model.lora.scale)


@torch.no_grad()
def iter_full(
    model: StudentModel,
    entries: Sequence[TensorEntry],
    value: Callable[[torch.nn.Parameter], Tensor] = lambda param: param.data,
) -> Iterator[tuple[str, Tensor]]:
    """Yield (HF name, full tensor) of entries of this pipeline stage.

    Collective over the TP group and, with experts, over the EP group: each of their ranks must exhaust the iterator.
    One Megatron parameter (or one parameter of an expert) is gathered at a time. If its parts are not contiguous in
    HF's order, a second copy exists temporarily. A tensor may alias the live weights, so consume or copy it before the
    next training step.

    Args:
        entries: the same on all ranks of the stage.
        value: returns the tensor to export for a parameter, of the same shape; for example its gradient.
    """
    params = dict(model.named_params())
    for entry in entries:
        if not entry.exported:
            continue
        # Do not bind the gathered tensors to a name: it would keep them alive while the next ones are gathered.
        yield from zip(
            entry.hf_names,
            entry.layout.join(_gather(entry, value(params[entry.param]), model), model.dims),
            strict=True,
        )


def _gather(entry: TensorEntry, shard: Tensor, model: StudentModel) -> Tensor:
    """Return the [tp, *shape] shards of all TP ranks, on every one of them; of an expert [1, *shape]."""
    if entry.owner is not None:
        return _from_owner(shard, entry.owner, model)
    if model.layout.tp == 1:
        return shard[None]
    shards = shard.new_empty((model.layout.tp, *shard.shape))
    dist.all_gather_into_tensor(shards, shard.contiguous()[None], group=model.groups.tp)
    return shards


def _from_owner(mine: Tensor, owner: int, model: StudentModel) -> Tensor:
    """Return the [1, *shape] tensor of EP rank `owner` on every rank of the EP group; `mine` has the same shape."""
    if model.layout.ep == 1:
        return mine[None]
    is_owner = owner == model.layout.ep_rank
    tensor = mine.contiguous() if is_owner else torch.empty_like(mine, memory_format=torch.contiguous_format)
    dist.broadcast(tensor, src=dist.get_global_rank(model.groups.ep, owner), group=model.groups.ep)
    return tensor[None]
