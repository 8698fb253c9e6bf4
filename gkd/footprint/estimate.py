"""Compute the memory of every rank of a run from its settings and its models' config.json; no model is built."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from gkd.config.interval import Interval, save_interval
from gkd.config.schema import Config
from gkd.config.schema_teacher import ACTOR
from gkd.errors import ModelError
from gkd.footprint.fsdp import fsdp_footprints, groups
from gkd.footprint.megatron import megatron_footprints
from gkd.footprint.rank import OFFLOADED_STATES, RankFootprint
from gkd.footprint.rollout import rollout_footprint
from gkd.footprint.teacher import with_local_teacher, with_reference
from gkd.hf.megatron_support import check_megatron_support
from gkd.hf.model_dims import read_dims
from gkd.hf.model_folder import ModelFolder, Tensors, read_model_folder

# Memory of a process on its GPU before the first tensor: CUDA context, kernels, cuBLAS workspaces, NCCL's buffers. An
# allowance, not measured.
CONTEXT_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class RunModels:
    """The model folders of a run's actor and rollout ranks, for estimates with these or changed settings."""

    student: ModelFolder
    local_teacher: ModelFolder | None  # None: a teacher server has it
    reference: ModelFolder | None  # None: there is no frozen reference model

    def footprint(self, config: Config, teacher_hidden: int | None = None) -> tuple[RankFootprint, ...]:
        """Return `footprint` of these models.

        Args:
            teacher_hidden: hidden size of a teacher server's model; that of a local teacher is known.
        """
        local, frozen = self.local_teacher, self.reference
        return footprint(
            config,
            self.student.config_json,
            tensors=self.student.tensors,
            teacher_hidden=teacher_hidden if local is None else local.dims.hidden_size,
            local_teacher=None if local is None else (local.config_json, local.tensors),
            reference=None if frozen is None else (frozen.config_json, frozen.tensors),
        )


# Value of `actor.strategy` -> the function that refuses a model, and the one that returns the footprints of its ranks.
_SUPPORT = {"megatron": check_megatron_support}
_ACTORS = {"megatron": megatron_footprints, "fsdp2": fsdp_footprints}


def read_models(config: Config) -> RunModels:
    """Read the model folders of a run. Raises ConfigError, ModelError as `read_model_folder`."""
    student, derived = read_model_folder(config.model.path, "model.path"), config.derived
    teacher = read_model_folder(config.teacher.path, "teacher.path") if derived.teacher_pool == ACTOR else None
    path = derived.reference_folder
    key = "reference.path" if config.reference.path else "model.path"
    return RunModels(student, teacher, read_model_folder(path, key) if path else None)


def footprint(
    config: Config,
    config_json: Mapping[str, Any],
    *,
    tensors: Tensors | None = None,
    teacher_hidden: int | None = None,
    local_teacher: tuple[Mapping[str, Any], Tensors | None] | None = None,
    reference: tuple[Mapping[str, Any], Tensors | None] | None = None,
) -> tuple[RankFootprint, ...]:
    """Return one footprint per kind of rank: the actor's pipeline stages in their order, then a rollout engine's ranks.

    Args:
        config: trainer.device `auto` counts as cuda.
        config_json: of the student.
        tensors: shapes in the student's files; required if config.json does not determine the parameters (fsdp2 only).
        teacher_hidden: hidden size of the teacher, whose LM head a rank keeps with teacher.signal `hidden`; None: the
            head is left out.
        local_teacher: config.json and tensors of teacher.path, if teacher.backend is local.
        reference: the same for `Derived.reference_folder`, if there is one.

    Raises:
        ModelError: sizes are missing, or actor.strategy=megatron does not support the model.
        ConfigError: the ranks cannot split the model.
    """
    dims, on_cpu = read_dims(config_json), config.trainer.device == "cpu"
    check = _SUPPORT.get(config.actor.strategy)
    if check is not None:
        check(config_json)
    if not dims.is_exact and tensors is None:
        raise ModelError(
            f"the parameters of model_type {dims.model_type!r} have to be counted in its safetensors files, "
            "and there are none."
        )
    actors = list(_ACTORS[config.actor.strategy](config, dims, tensors, on_cpu=on_cpu, teacher_hidden=teacher_hidden))
    if config.derived.moves_states:
        actors = [replace(part, parts={**part.parts, "moved_states": _moved(part)}) for part in actors]
    if local_teacher is not None:
        actors = [with_local_teacher(part, config, *local_teacher, on_cpu=on_cpu) for part in actors]
    if reference is not None:
        actors = [with_reference(part, config, *reference, on_cpu=on_cpu) for part in actors]
    if save_interval(config.trainer.save_every) == Interval() and not config.trainer.keep_best:
        actors = [replace(part, parts={**part.parts, "saved_copy": 0}) for part in actors]  # no save while it trains
    engine = rollout_footprint(config, dims, groups(config, dims, tensors), on_cpu=on_cpu)
    if config.trainer.colocate:  # for a save and an export the engine sleeps, and its weights are kept on the host
        engine = replace(engine, parts={**engine.parts, "moved_states": engine.parts["weights"]})
    found = (*actors, engine)
    return found if on_cpu else tuple(_with_context(part) for part in found)


def _moved(part: RankFootprint) -> int:
    """Return the bytes of the states in host memory between two calls; gradients are not kept."""
    return sum(part.parts.get(name, 0) for name in OFFLOADED_STATES if name != "gradients")


def _with_context(part: RankFootprint) -> RankFootprint:
    return replace(part, parts={**part.parts, "context": CONTEXT_BYTES})
