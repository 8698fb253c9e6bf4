"""Gather Megatron shards into full tensors under HF names, one at a time, for weight transfer and saving.

Each pipeline stage exports its own tensors in the order of `export_plan`. The gathers are collectives of the ranks
for which `ParallelLayout.exports` is true. Tied embeddings are exported once, without padding rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from gkd.actor.common.base import ADAPTER_FOLDER
from gkd.actor.common.lora import merge
from gkd.actor.megatron.hf_mapping import Shape, TensorEntry, stage_entries
from gkd.actor.megatron.lora import Adapter
from gkd.actor.megatron.model import StudentModel
from gkd.errors import ModelError
from gkd.hf.folder import MAX_SHARD_BYTES, TensorPlan, exhaust, write_adapters, write_folder
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
        model: this rank's stage.
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
    tensor = (
        mine.contiguous()
        if owner == model.layout.ep_rank
        else torch.empty_like(mine, memory_format=torch.contiguous_format)
    )
    dist.broadcast(tensor, src=dist.get_global_rank(model.groups.ep, owner), group=model.groups.ep)
    return tensor[None]


# Save the student as a HF folder that transformers and vLLM can load.
#
# Each tensor is gathered over TP and EP, sent to rank 0, and written before the next one. No rank holds more than one
# gathered tensor in addition to its shards. `gkd.hf.folder` writes the files.

Tensors: TypeAlias = Iterator[tuple[str, Tensor]]
Plans: TypeAlias = Sequence[Sequence[TensorPlan]]  # one sequence per stage


def save_hf(
    model: StudentModel, out_dir: str | Path, source_dir: str | Path, *, max_shard_bytes: int = MAX_SHARD_BYTES
) -> None:
    """Write the student as a HF folder; see `Student.save_hf`. Collective; blocks.

    Args:
        max_shard_bytes: maximum size of a file, unless a single tensor is larger.
    """
    out, source = Path(out_dir), Path(source_dir)

    def write_model(tensors: Tensors, plans: Plans) -> None:
        write_folder(tensors, plans, out, source, max_shard_bytes)

    def write_factors(tensors: Tensors, plans: Plans) -> None:
        assert model.lora is not None
        write_adapters(tensors, list(chain(*plans)), out / ADAPTER_FOLDER, model.lora, str(source))

    _save(model, "merged", write_model, out)
    if model.lora is not None:
        _save(model, "adapters", write_factors, out)


def _save(model: StudentModel, content: Content, write: Callable[[Tensors, Plans], None], out_dir: Path) -> None:
    """Call `write` on rank 0 with the tensors of all stages. Collective. Raises ModelError on every rank."""
    problem: Exception | None = None
    if model.layout.exports:  # the other DP ranks hold copies
        plans: list[Any] = [None] * model.layout.pp
        dist.all_gather_object(plans, export_plan(model, content), group=model.groups.pp)
        if model.layout.rank == 0:
            tensors = _all_stages(model, content, plans)
            try:
                write(tensors, plans)
            except Exception as error:  # raised below, on all ranks
                problem = error
            exhaust(tensors)  # after an error the other stages still send and would block otherwise
        elif model.layout.tp_rank == model.layout.dp_rank == 0:
            for _, tensor in iter_hf_tensors(model, content):
                if model.layout.pp_rank > 0:
                    _transfer(dist.isend, tensor.contiguous(), model, stage=0)
        else:
            exhaust(iter_hf_tensors(model, content))  # this rank only joins the gathers
    outcome = [None if problem is None else f"{type(problem).__name__}: {problem}"]
    dist.broadcast_object_list(outcome, src=0)
    if outcome[0] is not None:
        raise ModelError(f"the student cannot be saved to {out_dir}: {outcome[0]}") from problem


def _all_stages(model: StudentModel, content: Content, plans: Plans) -> Tensors:
    """Yield, on rank 0, the tensors of its own stage and then the tensors that the other stages send, in plan order."""
    yield from iter_hf_tensors(model, content)
    device = model.device
    for stage, plan in list(enumerate(plans))[1:]:
        for name, shape, dtype in plan:
            tensor = torch.empty(shape, dtype=dtype, device=device)
            _transfer(dist.irecv, tensor, model, stage)
            yield name, tensor
            del tensor  # before the next one is allocated


def _transfer(op: Callable[..., Any], tensor: Tensor, model: StudentModel, stage: int) -> None:
    """Send a tensor to another stage or receive one. Blocks.

    Batched, because NCCL would make a communicator with memory of its own for each pair of stages that sends unbatched.
    """
    group = model.groups.pp
    for work in dist.batch_isend_irecv([dist.P2POp(op, tensor, dist.get_global_rank(group, stage), group)]):
        work.wait()
