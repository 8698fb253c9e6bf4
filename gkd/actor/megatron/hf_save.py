"""Save the student as a HF folder that transformers and vLLM can load.

Each tensor is gathered over TP and EP, sent to rank 0, and written before the next one. No rank holds more than one
gathered tensor in addition to its shards. `gkd.hf.folder` writes the files.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gkd.actor.megatron.hf_export import export_plan, iter_hf_tensors
from gkd.actor.megatron.hf_mapping import Shape
from gkd.actor.megatron.model import StudentModel
from gkd.errors import ModelError
from gkd.hf.folder import MAX_SHARD_BYTES, exhaust, write_folder


def save_hf(
    model: StudentModel, out_dir: str | Path, source_dir: str | Path, *, max_shard_bytes: int = MAX_SHARD_BYTES
) -> None:
    """Write the student as a HF folder; see `Student.save_hf`. Collective; blocks.

    Args:
        max_shard_bytes: maximum size of a file, unless a single tensor is larger.
    """
    problem: Exception | None = None
    if model.layout.exports:  # the other DP ranks hold copies
        plans: list[Any] = [None] * model.layout.pp
        dist.all_gather_object(plans, export_plan(model), group=model.groups.pp)
        if model.layout.rank == 0:
            tensors = _all_stages(model, plans)
            try:
                write_folder(tensors, plans, Path(out_dir), Path(source_dir), max_shard_bytes)
            except Exception as error:  # raised below, on all ranks
                problem = error
            exhaust(tensors)  # after an error the other stages still send and would block otherwise
        elif model.layout.tp_rank == model.layout.dp_rank == 0:
            for _, tensor in iter_hf_tensors(model):
                if model.layout.pp_rank > 0:
                    dist.send(tensor.contiguous(), dst=_rank_of_stage(model, 0), group=model.groups.pp)
        else:
            exhaust(iter_hf_tensors(model))  # only joins the gathers
    outcome = [None if problem is None else f"{type(problem).__name__}: {problem}"]
    dist.broadcast_object_list(outcome, src=0)
    if outcome[0] is not None:
        raise ModelError(f"the student cannot be saved to {out_dir}: {outcome[0]}") from problem


def _all_stages(model: StudentModel, plans: list[list[tuple[str, Shape, torch.dtype]]]) -> Iterator[tuple[str, Tensor]]:
    """Yield, on rank 0, the tensors of its own stage and then those that the other stages send, in plan order."""
    yield from iter_hf_tensors(model)
    device = model.device
    for stage, plan in list(enumerate(plans))[1:]:
        for name, shape, dtype in plan:
            tensor = torch.empty(shape, dtype=dtype, device=device)
            dist.recv(tensor, src=_rank_of_stage(model, stage), group=model.groups.pp)
            yield name, tensor
            del tensor  # before the next one is allocated


def _rank_of_stage(model: StudentModel, stage: int) -> int:
    return dist.get_global_rank(model.groups.pp, stage)
