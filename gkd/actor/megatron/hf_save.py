"""The trained student as a HF folder that transformers and vLLM load.

Tensors travel one by one: gathered over TP and EP, sent along the pipeline to rank 0, which writes each as it comes.
No rank holds more than one besides its own.
The folder appears under its final name only when it is complete.
"""

from __future__ import annotations

import json
import shutil
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gkd.actor.megatron.hf_load import INDEX_NAME, SINGLE_NAME
from gkd.actor.megatron.hf_mapping import Shape
from gkd.actor.megatron.model import StudentModel
from gkd.actor.safetensors_file import write_safetensors
from gkd.disk import fsync, fsync_tree
from gkd.errors import ModelError
from gkd.weight_sync.export import export_plan, iter_hf_tensors

MAX_SHARD_BYTES = 4 << 30
# Weights in any format, and their indices, are what the export replaces; the rest is copied.
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")


def save_hf(
    model: StudentModel, out_dir: str | Path, source_dir: str | Path, *, max_shard_bytes: int = MAX_SHARD_BYTES
) -> None:
    """Writes weights, and config, generation config and tokenizer as in `source_dir`. Collective, blocks.

    Args:
        out_dir: must not exist; on a file system that rank 0 sees.
        source_dir: the HF folder the student was built from.
        max_shard_bytes: a file is closed before it would grow past this size.

    Raises:
        ModelError: `out_dir` exists or cannot be written; on every rank.
    """
    problem: Exception | None = None
    if model.layout.exports:  # the other DP ranks hold copies
        plans: list[Any] = [None] * model.layout.pp
        dist.all_gather_object(plans, export_plan(model), group=model.groups.pp)
        if model.layout.rank == 0:
            tensors = _all_stages(model, plans)
            try:
                _write_folder(tensors, plans, Path(out_dir), Path(source_dir), max_shard_bytes)
            except Exception as error:  # raised below, on all ranks
                problem = error
            _exhaust(tensors)  # after an error the other stages still send, and must not be left waiting
        elif model.layout.tp_rank == model.layout.dp_rank == 0:
            for _, tensor in iter_hf_tensors(model):
                if model.layout.pp_rank > 0:
                    dist.send(tensor.contiguous(), dst=_rank_of_stage(model, 0), group=model.groups.pp)
        else:
            _exhaust(iter_hf_tensors(model))  # takes part in the gathers only
    outcome = [None if problem is None else f"{type(problem).__name__}: {problem}"]
    dist.broadcast_object_list(outcome, src=0)
    if outcome[0] is not None:
        raise ModelError(f"the student cannot be saved to {out_dir}: {outcome[0]}") from problem


def _all_stages(model: StudentModel, plans: list[list[tuple[str, Shape, torch.dtype]]]) -> Iterator[tuple[str, Tensor]]:
    """On rank 0: its own stage's tensors, then those that the other stages send, in the order of the plans."""
    yield from iter_hf_tensors(model)
    device = model.device
    for stage, plan in list(enumerate(plans))[1:]:
        for name, shape, dtype in plan:
            tensor = torch.empty(shape, dtype=dtype, device=device)
            dist.recv(tensor, src=_rank_of_stage(model, stage), group=model.groups.pp)
            yield name, tensor
            del tensor  # before the next one is made


def _exhaust(iterator: Iterator[object]) -> None:
    """Runs an iterator to its end for what it does on the way."""
    deque(iterator, maxlen=0)


def _rank_of_stage(model: StudentModel, stage: int) -> int:
    return dist.get_global_rank(model.groups.pp, stage)


def _write_folder(
    tensors: Iterator[tuple[str, Tensor]],
    plans: list[list[tuple[str, Shape, torch.dtype]]],
    out_dir: Path,
    source_dir: Path,
    max_shard_bytes: int,
) -> None:
    """Everything rank 0 puts on disk. Raises OSError."""
    if out_dir.exists():
        raise FileExistsError(f"{out_dir} exists already; choose another folder or remove it")
    partial = out_dir.with_name(f"{out_dir.name}.partial")
    if partial.exists():
        shutil.rmtree(partial)  # what an interrupted save left
    partial.mkdir(parents=True)
    for source in sorted(source_dir.iterdir()):
        if source.is_file() and not source.name.endswith(_WEIGHT_SUFFIXES):
            shutil.copy2(source, partial / source.name)
    specs = {spec[0]: spec for plan in plans for spec in plan}
    sizes = {name: _n_bytes(shape, dtype) for name, shape, dtype in specs.values()}
    _set_dtype(partial / "config.json", plans[0][0][2])
    files = _split_into_files(sizes, max_shard_bytes)
    for file_name, names in files.items():
        write_safetensors(partial / file_name, [specs[name] for name in names], tensors)
    if len(files) > 1:
        weight_map = {name: file_name for file_name, names in files.items() for name in names}
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        (partial / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n")
    fsync_tree(partial)
    partial.rename(out_dir)
    fsync(out_dir.parent)


def _split_into_files(sizes: dict[str, int], max_bytes: int) -> dict[str, list[str]]:
    """File name -> tensor names, filled in order; a tensor is never split."""
    groups: list[list[str]] = []
    room = 0
    for name, size in sizes.items():
        if not groups or size > room:
            groups.append([])
            room = max_bytes
        groups[-1].append(name)
        room -= size
    if len(groups) == 1:
        return {SINGLE_NAME: groups[0]}
    return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": names for i, names in enumerate(groups, start=1)}


def _set_dtype(config_path: Path, dtype: torch.dtype) -> None:
    """Makes config.json say what the exported weights are; both spellings, old readers know only the first."""
    config = json.loads(config_path.read_text())
    for key in ("torch_dtype", "dtype"):
        if key in config or key == "dtype":
            config[key] = str(dtype).removeprefix("torch.")
    config_path.write_text(json.dumps(config, indent=2) + "\n")


def _n_bytes(shape: Shape, dtype: torch.dtype) -> int:
    return torch.Size(shape).numel() * dtype.itemsize
