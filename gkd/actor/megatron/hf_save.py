"""The trained student as a HF folder that transformers and vLLM load.

Tensors travel one by one: gathered over TP and EP, sent along the pipeline to rank 0, which writes each as it comes.
No rank holds more than one besides its own. `gkd.hf.folder` does the writing.
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
                write_folder(tensors, plans, Path(out_dir), Path(source_dir), max_shard_bytes)
            except Exception as error:  # raised below, on all ranks
                problem = error
            exhaust(tensors)  # after an error the other stages still send, and must not be left waiting
        elif model.layout.tp_rank == model.layout.dp_rank == 0:
            for _, tensor in iter_hf_tensors(model):
                if model.layout.pp_rank > 0:
                    dist.send(tensor.contiguous(), dst=_rank_of_stage(model, 0), group=model.groups.pp)
        else:
            exhaust(iter_hf_tensors(model))  # takes part in the gathers only
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


def _rank_of_stage(model: StudentModel, stage: int) -> int:
    return dist.get_global_rank(model.groups.pp, stage)
