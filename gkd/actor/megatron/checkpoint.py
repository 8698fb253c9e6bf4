"""Write the state of a Megatron rank to a checkpoint, and load it in any parallel layout.

A DistributedOptimizer gives each DP rank a flat range of each TP part of a parameter: float32 weights and the two
moments. Those ranges are the pieces of `gkd.actor.common.shards`, named after the parameter's first HF tensor. Names
and ranges are global, so PP and DP sizes may change freely. For another TP size, the old parts that a rank needs are
joined to HF tensors and split again, one parameter at a time. Values are copied bit-exactly.

In the same layout the resume is bit-exact, including the random generators. In another layout the generators, which
belong to ranks, keep their seeded state.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor

from gkd.actor.common.agree import same_error
from gkd.actor.common.hf_folder import Readers
from gkd.actor.common.lora import merge
from gkd.actor.common.shards import KINDS, Piece, ShardReader, check_same_student, restore_rng, rng_state
from gkd.actor.megatron.hf_mapping import WHOLE, Shape, SplitVocab, TensorEntry, stage_entries
from gkd.actor.megatron.lora import adapter_shapes, adapters_of
from gkd.actor.megatron.model import StudentModel
from gkd.actor.megatron.model_config import read_megatron_dims
from gkd.config.schema import Config
from gkd.hf.model_folder import weights_digest

_TRACKER = "megatron."  # prefix of the names of Megatron's generators


def pieces(model: StudentModel, optimizer: MegatronOptimizer) -> list[Piece]:
    """Return this rank's ranges of the trained parameters and of their moments, as live tensors. No collective."""
    return [
        Piece(entry.hf_names[0], kind, model.layout.tp_rank if _is_split(entry) else 0, start, tensors[kind].detach())
        for entry, start, _, tensors in _owned(model, optimizer)
        if _writes(entry, model)
        for kind in KINDS
    ]


def generators() -> dict[str, Tensor]:
    """Return the states of this rank's random generators, [n] uint8 by name."""
    tracker = tensor_parallel.get_cuda_rng_tracker().get_states()
    return rng_state() | {_TRACKER + name: state for name, state in tracker.items()}


def load(
    folder: str | Path, model: StudentModel, optimizer: MegatronOptimizer, meta: Mapping[str, Any]
) -> tuple[int, int]:
    """Load model and optimizer from a checkpoint, and the generators if the layout is the same. Collective; blocks.

    Returns:
        The number of steps after which the checkpoint was saved, and of those among them without an update.

    Raises:
        CheckpointError: there is none, or it is damaged or belongs to another model. The student cannot be used
            afterwards.
    """
    step = skipped = 0
    with same_error(model.device), ShardReader(folder) as reader:
        saved = reader.meta
        settings = ("strategy", "dtype", *(("lora_scale",) if model.lora else ()))
        check_same_student(folder, saved, meta, settings=settings, model="dims")
        step = saved["step"]
        skipped = saved.get("skipped", 0)
        _fill(reader, model, optimizer)
        for part in optimizer.chained_optimizers:
            for group in part.param_groups:
                group["step"] = step - skipped
        if saved["layout"] == _layout(model):
            states = reader.rng(model.layout.rank)
            tracker = {name: states.pop(name) for name in list(states) if name.startswith(_TRACKER)}
            restore_rng(states, folder)
            tensor_parallel.get_cuda_rng_tracker().set_states(
                {name.removeprefix(_TRACKER): state for name, state in tracker.items()}
            )
    # Copy main weights to this rank's range of the model and gather them on all DP ranks, like a step.
    for part in optimizer.chained_optimizers:
        part._copy_main_params_to_model_params()
    for chunk in optimizer.model_chunks:
        chunk.start_param_sync(force_sync=True)
    return step, skipped


def _owned(
    model: StudentModel, optimizer: MegatronOptimizer
) -> Iterator[tuple[TensorEntry, int, int, dict[str, Tensor]]]:
    """Yield (entry, start, stop, tensors by kind) of every range of a parameter that this rank's optimizer updates.

    The ranges count elements of the flattened TP part. The tensors are live, [stop - start] float32.
    """
    params = dict(model.named_params())
    entries = {params[entry.param]: entry for entry in model.trained_entries()}
    for part in optimizer.chained_optimizers:
        for param in part.model_param_gbuf_map:
            shard_range = part._get_model_param_range_map(param)["param"]
            main = part._get_main_param_and_optimizer_states(param)["param"]
            state = part.optimizer.state[main]
            for moment in KINDS[1:]:
                if moment not in state:  # before the first step; the optimizer starts with zeros, too
                    state[moment] = torch.zeros_like(main)
            tensors = {"param": main, **{moment: state[moment] for moment in KINDS[1:]}}
            yield entries[param], shard_range.start, shard_range.end, tensors


def _is_split(entry: TensorEntry) -> bool:
    """Return whether TP ranks have different parts of the parameter. TP does not split experts."""
    return entry.layout.partition_dim is not None and entry.owner is None


def _writes(entry: TensorEntry, model: StudentModel) -> bool:
    """Return whether this rank writes its range: not if it is a copy of another rank's range.

    The optimizer shards an expert over all ranks that hold it, including TP ranks.
    """
    is_tp_copy = entry.layout.partition_dim is None and entry.owner is None and model.layout.tp_rank > 0
    return entry.exported and not is_tp_copy


@torch.no_grad()
def _fill(reader: ShardReader, model: StudentModel, optimizer: MegatronOptimizer) -> None:
    """Copy every range that this rank owns from the checkpoint."""
    old_tp = reader.meta["layout"]["tp"]
    for entry, start, stop, tensors in _owned(model, optimizer):
        is_split = _is_split(entry)
        for kind, tensor in tensors.items():
            if is_split and old_tp != model.layout.tp:
                read = _read_vocab if isinstance(entry.layout, SplitVocab) else _resplit
                tensor.copy_(read(reader, kind, entry, model, old_tp, start, stop))
            else:
                part = model.layout.tp_rank if is_split else 0
                out = tensor if tensor.device.type == "cpu" else None
                values = reader.read(entry.hf_names[0], kind, part, start, stop, out=out)
                if out is None:
                    tensor.copy_(values)


def _read_vocab(
    reader: ShardReader, kind: str, entry: TensorEntry, model: StudentModel, old_tp: int, start: int, stop: int
) -> Tensor:
    """Return elements [start, stop) of this TP rank's part of an embedding or LM head, saved in `old_tp` parts.

    Its parts are ranges of the flattened matrix, so only the needed range of these large parameters is read.
    """
    old_size = math.prod(part_shape(entry, old_tp))
    whole = math.prod(entry.hf_shapes[0])
    begin = model.layout.tp_rank * math.prod(part_shape(entry, model.layout.tp))
    values = torch.zeros(stop - start)  # padding after the vocabulary stays zero
    position = begin + start
    end = min(begin + stop, whole)
    while position < end:
        part, offset = divmod(position, old_size)
        n = min(end - position, old_size - offset)
        done = position - begin - start
        reader.read(entry.hf_names[0], kind, part, offset, offset + n, out=values[done : done + n])
        position += n
    return values


def _resplit(
    reader: ShardReader, kind: str, entry: TensorEntry, model: StudentModel, old_tp: int, start: int, stop: int
) -> Tensor:
    """Return elements [start, stop) of this TP rank's part of a layer's parameter, saved in `old_tp` parts.

    With g = gcd(old_tp, tp), old and new parts both divide the same g blocks, and only this rank's block is read. Host
    memory holds the block at most twice, and the new part once.
    """
    layout = model.layout
    n_blocks = math.gcd(old_tp, layout.tp)
    n_old = old_tp // n_blocks
    n_new = layout.tp // n_blocks
    old_parts = torch.empty(n_old, *part_shape(entry, old_tp))
    for rank, out in enumerate(old_parts, start=layout.tp_rank // n_new * n_old):
        reader.read(entry.hf_names[0], kind, rank, 0, out.numel(), out=out.view(-1))
    n_heads = model.dims.n_heads // n_blocks
    n_kv_heads = model.dims.n_kv_heads // n_blocks
    dims = replace(model.dims, n_heads=n_heads, n_kv_heads=n_kv_heads)  # sizes of a block
    part = torch.empty(part_shape(entry, layout.tp))
    entry.layout.fill(part, entry.layout.join(old_parts, dims), dims, n_new, layout.tp_rank % n_new)
    return part.view(-1)[start:stop]


def readers(saved: ShardReader, config: Config, base: Path, held: Mapping[str, Any]) -> tuple[Readers, Readers]:
    """Return what reads the weights that `MegatronStudent.export` yields, and the adapters. `held`: tensors of `base`.

    Raises ModelError, CheckpointError: `base`, the folder that the student was built from, is of another model.
    """
    dims = read_megatron_dims(base)
    lora = config.actor.lora
    dtype = getattr(torch, saved.meta["dtype"])
    meta = {"dims": json.loads(json.dumps(asdict(dims))), "base": weights_digest(base) if lora.rank else ""}
    check_same_student(saved.folder, {"base": "", **saved.meta}, meta, settings=(), model="dims")
    adapters = {adapter.weight: adapter for adapter in adapters_of(dims, WHOLE, lora)} if lora.rank else {}

    @lru_cache(maxsize=2)  # a parameter may be several tensors, an adapter is two
    def param(entry: TensorEntry) -> tuple[Tensor, ...]:
        n_parts = saved.meta["layout"]["tp"] if _is_split(entry) else 1
        shape = part_shape(entry, n_parts)
        size = math.prod(shape)
        shards = [saved.read(entry.hf_names[0], "param", i, 0, size).view(shape) for i in range(n_parts)]
        return entry.layout.join(torch.stack(shards), dims)

    def tensor(entry: TensorEntry, i: int, dtype: torch.dtype) -> Tensor:
        name = entry.hf_names[i]
        if not lora.rank or (name, "param", 0) in saved.index:
            return param(entry)[i].to(dtype)
        weight: Tensor = held[name].get_tensor(name).to(dtype)
        adapter = adapters.get(name)
        return weight if adapter is None else merge(weight, param(adapter.a)[0], param(adapter.b)[0], lora.scale)

    def tensors(entries: Iterable[TensorEntry], dtype: torch.dtype) -> Readers:
        return {
            (name, entry.hf_shapes[i], dtype): partial(tensor, entry, i, dtype)
            for entry in entries
            for i, name in enumerate(entry.hf_names)
        }

    # A correction bias is not trained: no checkpoint has it, and `write_folder` copies it.
    entries = (entry for entry in stage_entries(dims, WHOLE) if not entry.param.endswith("correction_bias"))
    factors = (entry for adapter in adapters.values() for entry in (adapter.a, adapter.b))
    return tensors(entries, dtype), tensors(factors, torch.float32)


def part_shape(entry: TensorEntry, tp: int) -> Shape:
    """Return the shape of each of `tp` parts of a parameter, including vocabulary padding."""
    shape = list(entry.hf_shapes[0])
    dim = entry.layout.partition_dim
    if dim is not None:
        shape[dim] = -(-sum(tensor[dim] for tensor in entry.hf_shapes) // tp)
    return tuple(shape)


def student_meta(model: StudentModel, *, dtype: torch.dtype, base: str) -> dict[str, Any]:
    """Return the metadata that all ranks write, except the step, as it is after a JSON round trip.

    Args:
        base: digest of the frozen weights, which are not in the checkpoint; empty if all weights are trained.
    """
    meta = {
        "strategy": "megatron",
        "dtype": str(dtype).removeprefix("torch."),
        "dims": json.loads(json.dumps(asdict(model.dims))),
        "layout": _layout(model),
        "world_size": model.layout.world_size,
    }
    if model.lora is not None:
        meta |= {"lora_scale": model.lora.scale, "base": base, "shapes": adapter_shapes(model.dims, model.lora)}
    return meta


def _layout(model: StudentModel) -> dict[str, Any]:
    """Return the sizes that must be equal for a rank to restore its generators."""
    sizes = asdict(model.layout)
    del sizes["rank"]
    return {**sizes, "device": model.device.type}
