"""Every rank's memory, from the settings of a run and its student's config.json. Numbers only: no model is built."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gkd.config.derived import derive
from gkd.config.schema import Config
from gkd.errors import ModelError
from gkd.footprint.fsdp import fsdp_footprint, groups
from gkd.footprint.megatron import megatron_footprints
from gkd.footprint.rollout import rollout_footprint
from gkd.footprint.teacher import with_local_teacher, with_reference
from gkd.footprint.types import MOVING, RankFootprint
from gkd.hf.megatron_support import check_megatron_support
from gkd.hf.model_dims import read_dims
from gkd.hf.model_folder import Tensors

# What a process has on a card before its first tensor: the CUDA context, kernels, cuBLAS workspaces, NCCL's buffers. An
# allowance, not measured.
CONTEXT_BYTES = 1 << 30


def footprint(
    config: Config,
    config_json: Mapping[str, Any],
    *,
    tensors: Tensors | None = None,
    teacher_hidden: int | None = None,
    local_teacher: tuple[Mapping[str, Any], Tensors | None] | None = None,
    reference: tuple[Mapping[str, Any], Tensors | None] | None = None,
) -> tuple[RankFootprint, ...]:
    """One of each kind of rank: the actor's pipeline stages in their order, then a rollout engine's ranks.

    Args:
        config: trainer.device `auto` counts as cuda.
        config_json: of the student.
        tensors: shape by name of the student's files; needed where config.json does not tell the parameters (fsdp2
        only).
        teacher_hidden: hidden size of the teacher, whose LM head a rank keeps with teacher.signal `hidden`; without it
            that head is left out.
        local_teacher: config.json and tensors of teacher.path, where teacher.backend is local.
        reference: the same for `Derived.reference_folder`, if there is one.

    Raises:
        ModelError: sizes are missing, or the architecture is not one of actor.strategy megatron.
    """
    dims, on_cpu = read_dims(config_json), config.trainer.device == "cpu"
    if config.actor.strategy == "megatron":
        check_megatron_support(config_json)
    if not dims.is_exact and tensors is None:
        raise ModelError(
            f"the parameters of model_type {dims.model_type!r} have to be counted in its safetensors files, "
            "and there are none."
        )
    if config.actor.strategy == "megatron":
        actors = list(megatron_footprints(config, dims, on_cpu=on_cpu, teacher_hidden=teacher_hidden))
    else:
        actors = [fsdp_footprint(config, dims, tensors, on_cpu=on_cpu, teacher_hidden=teacher_hidden)]
    if derive(config).moves_states:
        actors = [replace(part, parts={**part.parts, "moved_states": _moved(part)}) for part in actors]
    if local_teacher is not None:
        config_json, tensors_there = local_teacher
        actors = [with_local_teacher(part, config, config_json, tensors_there, on_cpu=on_cpu) for part in actors]
    if reference is not None:
        config_json, tensors_there = reference
        actors = [with_reference(part, config, config_json, tensors_there, on_cpu=on_cpu) for part in actors]
    engine = rollout_footprint(config, dims, groups(config, dims, tensors), on_cpu=on_cpu)
    if config.trainer.colocate:  # an evaluation, a save and an export put it to sleep with its weights kept
        engine = replace(engine, parts={**engine.parts, "moved_states": engine.parts["weights"]})
    found = [*actors, engine]
    return tuple(found) if on_cpu else tuple(_with_context(part) for part in found)


def _moved(part: RankFootprint) -> int:
    """What waits in host memory between two calls; gradients come back as zeros."""
    return sum(part.parts.get(name, 0) for name in MOVING if name != "gradients")


def _with_context(part: RankFootprint) -> RankFootprint:
    return replace(part, parts={**part.parts, "context": CONTEXT_BYTES})
