"""Let a frozen model follow the student: a teacher for self-distillation, or a reference that moves with the actor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gkd.actor.common.base import Student
from gkd.actor.common.host_copies import Snapshot
from gkd.actor.frozen.model import FrozenModel
from gkd.actor.megatron.layout import ParallelLayout
from gkd.config.schema_teacher import WeightUpdates
from gkd.errors import ConfigError, ModelError
from gkd.hf.folder import TensorPlan, exhaust
from gkd.log import get_logger

log = get_logger("frozen.follow")


class Follower:
    """Update a frozen model's weights from the student's. Its methods are collectives of all ranks.

    Args:
        layout: of the student, which maps pipeline stages to ranks.
        updates: without any the model is not part of checkpoints.
        changed: called after each change of the weights.

    Raises:
        ConfigError: naming `weights` of the model's section: model and student have different architectures.
    """

    def __init__(
        self,
        model: FrozenModel,
        student: Student,
        layout: ParallelLayout,
        device: torch.device,
        updates: WeightUpdates,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        self.model, self._student, self._layout, self._device = model, student, layout, device
        (self._interval, self._ema), self._changed = updates, changed
        if not self._interval:
            return
        try:
            model.check_plan([spec for stage in stage_plans(student, layout) for spec in stage])
        except ModelError as error:
            fix = f"use 0, or a {model.role}.path of the student's architecture."
            raise ConfigError(f"{model.role}.update_interval", updates.interval, f"{error}.", fix) from error

    def after_step(self) -> None:
        """Refresh the model if it is due; call it after each step of the student."""
        if not self._interval or self._student.step % self._interval:
            return
        self.model.refresh(whole_student(self._student, self._layout, self._device), self._ema)
        log.info("step %d: refreshed the %s from the student (ema %g)", self._student.step, self.model.role, self._ema)
        self._changed()

    def add_to(self, student: Snapshot) -> Snapshot:
        """Return the student's snapshot, joined with this rank's rows of the model if it follows the student.

        Not a collective. The copy to host memory is started, unless the student's states are not copied either; the
        next refresh waits for it.
        """
        return student.join(self.model.snapshot(copies=not student.is_live)) if self._interval else student

    def load(self, folder: Path) -> None:
        """Load the model of a checkpoint, if it follows the student. Raises CheckpointError, see `FrozenModel.load`."""
        if self._interval:
            self.model.load(folder)
            self._changed()


def stage_plans(student: Student, layout: ParallelLayout) -> list[list[TensorPlan]]:
    """Return, by pipeline stage, the export plan of its ranks. Collective over the world."""
    plans: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(plans, (layout.pp_rank, student.export_plan()))
    by_stage = dict(plans)
    return [by_stage[stage] for stage in range(layout.pp)]


def whole_student(student: Student, layout: ParallelLayout, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """Yield all tensors of the student on every rank, stage after stage. Collective over the world.

    The ranks of a stage produce its tensors by `Student.export`; the first of them broadcasts each to all ranks.
    """
    if layout.pp == 1:
        yield from student.export()
        return
    for stage, plan in enumerate(stage_plans(student, layout)):
        own = student.export() if layout.pp_rank == stage else iter(())
        first = stage * layout.world_size // layout.pp  # see `ParallelLayout` for the order of ranks
        for name, shape, dtype in plan:
            exported = next(own, None)
            # The broadcast overwrites the tensors of the stage's other ranks with equal ones.
            tensor = torch.empty(shape, dtype=dtype, device=device) if exported is None else exported[1].contiguous()
            dist.broadcast(tensor, src=first)
            yield name, tensor
        exhaust(own)
