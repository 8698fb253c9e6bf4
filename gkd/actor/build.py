"""Build the student of one actor rank from the settings, with the backend that actor.strategy names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch

from gkd.actor.common.optim_spec import OptimSpec
from gkd.actor.megatron.layout import ParallelLayout
from gkd.cluster.garbage import quick_imports
from gkd.config.schema import Config
from gkd.config.schema_teacher import ACTOR
from gkd.hf.model_dims import read_dims
from gkd.hf.model_folder import read_config_json

if TYPE_CHECKING:
    from gkd.actor.common.attention import Heads
    from gkd.actor.common.base import Student, StudentArgs


def build_student(
    config: Config,
    layout: ParallelLayout,
    device: torch.device,
    total_steps: int,
    collective_timeout_s: float,
    *,
    on_phase: Callable[[str], None],
) -> Student:
    """Build the student and load its weights. Collective.

    Args:
        total_steps: optimizer steps of the whole run, at which the learning-rate schedule ends.
        collective_timeout_s: of the process groups that the backend creates.
        on_phase: called with the name of each start-up phase.
    """
    actor, derived = config.actor, config.derived
    if actor.attention != "auto":
        from gkd.actor.common.attention import use_flash_attention

        on_phase("comparing the attention kernels")
        use_flash_attention(actor.attention, _heads(config), getattr(torch, config.model.dtype), device)
    common: StudentArgs = {
        "optim": OptimSpec(**vars(actor.optim), total_steps=total_steps),
        "dtype": getattr(torch, config.model.dtype),
        "device": device,
        "loss": derived.loss,
        "signals": derived.signals,
        "fused_lm_head": actor.fused_lm_head,
        "n_vocab": config.model.n_vocab,
        "seed": config.data.seed,
        "on_phase": on_phase,
    }
    return _BUILD[actor.strategy](config, layout, collective_timeout_s, common)


# The backends are imported in their functions, because the driver imports the worker for its class alone.


def _megatron(config: Config, layout: ParallelLayout, collective_timeout_s: float, common: StudentArgs) -> Student:
    with quick_imports():
        from gkd.actor.megatron.student import MegatronStudent

    return MegatronStudent(
        config.model.path,
        layout,
        layers=config.actor.layers,
        # Within a node the reduction takes little time.
        overlap_grad_reduce=config.trainer.nnodes > 1 and common["device"].type == "cuda",
        recompute=config.actor.recompute,
        sequence_parallel=config.actor.sequence_parallel,
        lora=config.actor.lora,
        collective_timeout_s=collective_timeout_s,
        **common,
    )


def _fsdp(config: Config, layout: ParallelLayout, collective_timeout_s: float, common: StudentArgs) -> Student:
    with quick_imports():
        from gkd.actor.fsdp.student import FsdpStudent

    return FsdpStudent(
        config.model.path,
        recompute=config.actor.recompute,
        packing=config.actor.packing,
        cpu_offload=config.actor.fsdp_cpu_offload,
        lora=config.actor.lora,
        trust_remote_code=config.model.trust_remote_code,
        **common,
    )


_BUILD = {"megatron": _megatron, "fsdp2": _fsdp}


def _heads(config: Config) -> Iterator[Heads]:
    """Yield the attention shapes of one rank: of the student, and of frozen models, whose heads are not split."""
    derived = config.derived
    yield _heads_of(config.model.path, "model.path", config.actor.tp)
    if derived.teacher_pool == ACTOR:
        yield _heads_of(config.teacher.path, "teacher.path")
    if derived.reference_folder:
        yield _heads_of(derived.reference_folder, "reference.path" if config.reference.path else "model.path")


def _heads_of(folder: str, key: str, tp: int = 1) -> Heads:
    from gkd.actor.common.attention import Heads

    dims = read_dims(read_config_json(folder, key))
    return Heads(dims.n_heads // tp, max(1, dims.n_kv_heads // tp), dims.head_dim)
