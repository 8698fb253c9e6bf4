"""What the tests of the student's backends share: how either is built, and the same batch packed or dealt to ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gkd.loss.spec import LossSpec
from gkd.types import MicroBatch
from tests.dist.megatron_reference import BETAS, CLIP, EPS, LR, WEIGHT_DECAY

CPU = torch.device("cpu")


def build_student(backend: str, folder: Path, rank: int, world_size: int, *, lr: float = LR, **changes: Any) -> Any:
    """A student with the settings of `train_reference`, all ranks data parallel."""
    from gkd.actor.optim_spec import OptimSpec

    optim = OptimSpec(lr=lr, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, clip_grad=CLIP)
    settings = {"optim": optim, "loss": LossSpec(), "dtype": torch.float32, "device": CPU, "seed": 1} | changes
    if backend == "fsdp2":
        from gkd.actor.fsdp.student import FsdpStudent

        return FsdpStudent(folder, **settings)
    from gkd.actor.megatron.layout import ParallelLayout
    from gkd.actor.megatron.student import MegatronStudent

    return MegatronStudent(folder, ParallelLayout(tp=1, pp=1, world_size=world_size, rank=rank), **settings)


def packed(batch: MicroBatch) -> MicroBatch:
    """A micro-batch of `make_micro_batches`, whose sequence b ends b columns before the end, without its padding."""
    n_sequences, length = batch.tokens.shape
    lengths = [length - b for b in range(n_sequences)]
    starts = torch.tensor([0, *lengths]).cumsum(0)
    row, column = batch.loss_index // length, batch.loss_index % length
    return replace(
        batch,
        tokens=torch.cat([batch.tokens[b, :n] for b, n in enumerate(lengths)])[None],
        position_ids=torch.cat([torch.arange(n) for n in lengths])[None],
        loss_index=starts[row] + column,
        cu_seqlens=starts.to(torch.int32),
    )


def with_nan(batch: MicroBatch) -> MicroBatch:
    """The same with a teacher that is not a number."""
    targets = batch.targets
    assert targets is not None and targets.topk_logprobs is not None
    return replace(batch, targets=replace(targets, topk_logprobs=targets.topk_logprobs * float("nan")))


def share(batches: list[MicroBatch], rank: int, world_size: int) -> list[MicroBatch]:
    """Rank 0 takes all micro-batches but one, rank 1 that one: unequal counts on purpose."""
    return batches if world_size == 1 else batches[:-1] if rank == 0 else batches[-1:]


def weights(student: Any) -> dict[str, torch.Tensor]:
    """Everything a rank exports, copied."""
    return {name: tensor.clone() for name, tensor in student.export()}


def same_weights(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(tensor, two[name]) for name, tensor in one.items())


def as_numpy(tensors: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """For the way out of a rank: torch would hand over files that end with the process."""
    return {name: tensor.numpy() for name, tensor in tensors.items()}
