"""The settings' student, of either backend, on one rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from gkd.actor.common.optim_spec import OptimSpec
from gkd.actor.megatron.layout import ParallelLayout
from gkd.cluster.imports import quick_imports
from gkd.config.loss_spec import LossSpec
from gkd.config.schema import Config, OptimConfig
from teacher_server.wire.protocol import Signal

if TYPE_CHECKING:
    from gkd.actor.common.base import Student


def build_student(
    config: Config,
    layout: ParallelLayout,
    device: torch.device,
    *,
    loss: LossSpec,
    signals: tuple[Signal, ...],
    total_steps: int,
    patience_s: float,
    on_phase: Callable[[str], object],
) -> Student:
    """Builds it and loads its weights; blocks for all ranks.

    Args:
        total_steps: optimizer steps of the whole run, where the learning rate's schedule ends.
        patience_s: how long ranks wait for one another in a collective.
        on_phase: is told what the start is at.
    """
    # Imported here and not above: the driver imports the worker for its class alone and should load neither.
    actor = config.actor
    common: dict[str, Any] = {
        "optim": _optim_spec(actor.optim, total_steps),
        "dtype": getattr(torch, config.model.dtype),
        "device": device,
        "loss": loss,
        "signals": signals,
        "fused_lm_head": actor.fused_lm_head,
        "logits_chunk_mib": actor.logits_chunk_mib,
        "loss_kernel": actor.loss_kernel,
        "seed": config.data.seed,
        "on_phase": on_phase,
    }
    if actor.strategy == "fsdp2":
        with quick_imports():
            from gkd.actor.fsdp.student import FsdpStudent

        return FsdpStudent(
            config.model.path,
            recompute=actor.recompute,
            packing=actor.packing,
            cpu_offload=actor.fsdp_cpu_offload,
            lora=actor.lora,
            trust_remote_code=config.model.trust_remote_code,
            **common,
        )
    with quick_imports():
        from gkd.actor.megatron.student import MegatronStudent

    return MegatronStudent(
        config.model.path,
        layout,
        recompute=actor.recompute,
        sequence_parallel=actor.sequence_parallel,
        collective_timeout_s=patience_s,
        **common,
    )


def _optim_spec(optim: OptimConfig, total_steps: int) -> OptimSpec:
    return OptimSpec(
        lr=optim.lr,
        betas=(optim.betas[0], optim.betas[1]),
        eps=optim.eps,
        weight_decay=optim.weight_decay,
        clip_grad=optim.clip_grad,
        schedule=optim.schedule,
        warmup_steps=optim.warmup_steps,
        total_steps=total_steps,
        decay_steps=optim.decay_steps,
        min_lr_ratio=optim.min_lr_ratio,
    )
