"""Save the student as a HF folder that transformers and vLLM can load.

Each tensor is gathered over TP and EP, sent to rank 0, and written before the next one. No rank holds more than one
gathered tensor in addition to its shards. `gkd.hf.folder` writes the files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from gkd.actor.common.base import ADAPTER_FOLDER
from gkd.actor.megatron.hf_export import export_plan, iter_hf_tensors
from gkd.actor.megatron.model import StudentModel
from gkd.config.schema import LoraConfig
from gkd.errors import ModelError
from gkd.hf.adapter_folder import write_adapters
from gkd.hf.folder import MAX_SHARD_BYTES, TensorPlan, exhaust, write_folder
from gkd.weight_sync.buckets import Content

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

    _save(model, "merged", write_model, out)
    if model.lora is not None:
        _save(
            model, "adapters", partial(_write_adapters, folder=out / ADAPTER_FOLDER, lora=model.lora, base=source), out
        )


def _write_adapters(tensors: Tensors, plans: Plans, *, folder: Path, lora: LoraConfig, base: Path) -> None:
    write_adapters(tensors, [spec for plan in plans for spec in plan], folder, lora, str(base))


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
