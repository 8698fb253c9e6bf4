"""Provide helpers for tests of both student backends: construction, packing, shares of ranks, comparisons."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gkd.config.loss_spec import LossSpec
from gkd.types import MicroBatch
from tests.device import host, rank_device
from tests.dist.megatron_reference import BETAS, CLIP, EPS, LR, WEIGHT_DECAY


def build_student(
    backend: str,
    folder: Path,
    rank: int,
    world_size: int,
    *,
    lr: float = LR,
    tp: int = 1,
    pp: int = 1,
    ep: int = 1,
    cp: int = 1,
    vpp: int = 1,
    **changes: Any,
) -> Any:
    """Build a student with the settings of `train_reference`; ranks are data parallel by default."""
    from gkd.actor.common.optim_spec import OptimSpec

    optim = OptimSpec(lr=lr, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, clip_grad=CLIP)
    settings = {
        "optim": optim,
        "loss": LossSpec(),
        "dtype": torch.float32,
        "seed": 1,
        "device": rank_device(),
        **changes,
    }
    if backend == "fsdp2":
        from gkd.actor.fsdp.student import FsdpStudent

        return FsdpStudent(folder, cp=cp, **settings)
    from gkd.actor.megatron.layout import ParallelLayout
    from gkd.actor.megatron.student import MegatronStudent

    layout = ParallelLayout(tp=tp, pp=pp, ep=ep, cp=cp, vpp=vpp, world_size=world_size, rank=rank)
    return MegatronStudent(folder, layout, **settings)


def grads_of(student: Any, micro_batches: Sequence[MicroBatch]) -> dict[str, torch.Tensor]:
    """Return the gradients of one global batch as full float32 tensors by HF name; Megatron's of this rank's stage.

    With adapters on Megatron these are the gradients of the adapters, under the names of a checkpoint.
    """
    from gkd.actor.megatron import pipeline

    run = pipeline.get_forward_backward_func
    with pytest.MonkeyPatch.context() as patch:  # otherwise a data-parallel rank has the gradients of its own range
        patch.setattr(pipeline, "get_forward_backward_func", lambda: partial(run(), force_all_reduce=True))
        student._zero_grads()
        sums = student._run(micro_batches, backward=True)
    grads = _megatron_grads(student) if hasattr(student, "layout") else _fsdp_grads(student, sums.n_loss_tokens)
    student._zero_grads()
    return grads


def _megatron_grads(student: Any) -> dict[str, torch.Tensor]:
    from gkd.actor.megatron.hf_export import iter_full
    from gkd.actor.megatron.hf_mapping import stage_entries

    model = student.model
    entries = model.trained_entries() if model.adapters else stage_entries(model.dims, student.layout)
    full = iter_full(model, entries, value=lambda param: getattr(param, "main_grad", torch.zeros_like(param)))
    return {name: grad.clone() for name, grad in full}


def _fsdp_grads(student: Any, n_loss_tokens: int) -> dict[str, torch.Tensor]:
    from gkd.actor.fsdp.optim import scale_grads
    from gkd.actor.fsdp.weights import full_tensor

    scale_grads(student._trained, 1.0 / n_loss_tokens)
    places = [(place, place.tensor.grad) for place in student._places.values()]
    whole = [(place, full_tensor(grad, student.device)) for place, grad in places if grad is not None]
    return {part.name: part.cut_from(grad) for place, grad in whole for part in place.parts}


def packed(batch: MicroBatch) -> MicroBatch:
    """Pack a micro-batch of `make_micro_batches`, whose sequence b ends b columns before the end."""
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
    """Return a copy with NaN in the teacher's table."""
    targets = batch.targets
    assert targets is not None and targets.topk_logprobs is not None
    return replace(batch, targets=replace(targets, topk_logprobs=targets.topk_logprobs * float("nan")))


def with_hidden(batch: MicroBatch, width: int) -> MicroBatch:
    """Return a copy with hidden states of the teacher, which depend on the tokens alone, in place of its top-k."""
    assert batch.targets is not None
    generator = torch.Generator().manual_seed(int(batch.tokens.sum()))
    hidden = torch.randn((batch.n_loss_tokens, width), generator=generator)
    targets = replace(batch.targets, topk_ids=None, topk_logprobs=None, tail_mass=None, hidden=hidden)
    return replace(batch, targets=targets)


def share(batches: list[MicroBatch], rank: int, world_size: int) -> list[MicroBatch]:
    """Return all micro-batches but one for rank 0, that one for rank 1, and none for others: unequal on purpose."""
    return batches if world_size == 1 else [batches[:-1], batches[-1:], []][min(rank, 2)]


def step_in_parts(student: Any, batches: Sequence[MicroBatch]) -> Any:
    """Make one step: the first micro-batch is accumulated before the rest is given. Return the step's statistics."""
    student.accumulate(batches[:1])
    return student.train_step(batches[1:])


def weights(student: Any) -> dict[str, torch.Tensor]:
    """Return copies in host memory of all tensors that a rank exports."""
    return {name: tensor.to("cpu", copy=True) for name, tensor in student.export()}


def same_weights(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(tensor, two[name]) for name, tensor in one.items())


def as_numpy(tensors: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """Convert tensors for the return from a rank: torch would pass shared memory that is freed with the process."""
    return {name: host(tensor) for name, tensor in tensors.items()}
