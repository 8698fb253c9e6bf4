"""One rank of the local teacher: rollouts in, the tables that the loss asks for out; and how it follows the student.

On the road of one batch: rollout -> *teacher score* -> micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from gkd.actor.common.base import Student
from gkd.actor.common.host_copies import Snapshot
from gkd.actor.frozen.model import FrozenModel, Table
from gkd.actor.megatron.layout import ParallelLayout
from gkd.config.derived import derive
from gkd.config.schema import Config
from gkd.data.scatter import map_selected
from gkd.errors import ConfigError, ModelError
from gkd.hf.folder import TensorPlan, exhaust
from gkd.log import get_logger
from gkd.types import Rollout, TeacherScores, TeacherTopK
from teacher_server.engines.base import ScoreParams
from teacher_server.wire.payload import TopKScores
from teacher_server.wire.protocol import Signal, Wire

log = get_logger("frozen.teacher")


class LocalTeacher:
    """Every method is a collective over the actor's ranks.

    Args:
        student: of this rank; with teacher.signal `hidden` it is given the teacher's LM head, now and at each refresh.
        layout: of the student, which says whose weights a pipeline stage's export are.
        n_vocab: ids that student and teacher have in common; the teacher's other rows are cut before it normalises.

    Raises:
        ModelError, ConfigError: see `FrozenModel`; or ConfigError naming teacher.update_interval: the student's weights
            are not those of this teacher.
    """

    def __init__(
        self, config: Config, student: Student, layout: ParallelLayout, device: torch.device, n_vocab: int
    ) -> None:
        teacher, actor = config.teacher, config.actor
        self._student, self._layout, self._device, self._n_vocab = student, layout, device, n_vocab
        self._interval, self._ema = teacher.update_interval, teacher.update_ema
        derived = derive(config)
        self._model = FrozenModel(
            teacher.path,
            device=device,
            dtype=getattr(torch, config.model.dtype),
            key="teacher.path",
            cpu_offload=teacher.fsdp_cpu_offload,
            packing=actor.packing,
            max_batch_tokens=actor.max_tokens_per_micro_batch or actor.micro_batch_size * derived.max_sequence_length,
            float32_weights=self._ema > 0.0,
            trust_remote_code=config.model.trust_remote_code,
        )
        self._signals = derived.signals
        self._asked = [self._params(config, each) for each in self._signals]
        if self._interval:
            self._check_follows()
        self._hand_over_head()

    def score(
        self, sequence_indices: Sequence[bytes | None], chunks: Sequence[list[Rollout]]
    ) -> list[list[TeacherScores]]:
        """Return, by chunk, the scores of the sequences selected for this rank.

        Args:
            sequence_indices: of each chunk, see `gkd.data.scatter`.

        Raises:
            TeacherError: see `FrozenModel.score`.
        """
        by_chunk = map_selected(sequence_indices, chunks, lambda rollouts: self._model.score(rollouts, self._asked))
        return [[self._scores(tables) for tables in part] for part in by_chunk]

    def device_bytes(self) -> int:
        """See `FrozenModel.device_bytes`."""
        return self._model.device_bytes()

    def after_step(self) -> None:
        """The student has made a step: takes its weights, every teacher.update_interval steps."""
        if self._interval and self._student.step % self._interval == 0:
            self._refresh()

    def joined(self, student: Snapshot) -> Snapshot:
        """The student's share of a checkpoint, with this rank's share of the teacher if that follows the student.

        No collective. Begins to copy; the next refresh waits for the copy.
        """
        return student.join(self._model.snapshot()) if self._interval else student

    def load(self, folder: Path) -> None:
        """The teacher of a checkpoint, saved by any number of ranks; one that follows nobody is as it was.

        Raises:
            CheckpointError: it is not in there, or is another one; see `gkd.actor.frozen.checkpoint.load`.
        """
        if self._interval:
            self._model.load(folder)
            self._hand_over_head()

    def _refresh(self) -> None:
        self._model.refresh(whole_student(self._student, self._layout, self._device), self._ema)
        self._hand_over_head()
        log.info("step %d: the teacher took the student's weights (ema %g)", self._student.step, self._ema)

    def _check_follows(self) -> None:
        plan = [spec for stage in stage_plans(self._student, self._layout) for spec in stage]
        try:
            self._model.check_plan(plan)
        except ModelError as error:
            fix = "use 0, or a teacher.path of the student's architecture."
            raise ConfigError("teacher.update_interval", self._interval, f"{error}.", fix) from error

    def _hand_over_head(self) -> None:
        if "hidden" in self._signals:
            self._student.set_teacher_head(self._model.lm_head()[: self._n_vocab])

    def _params(self, config: Config, signal: Signal) -> ScoreParams:
        """There is no wire; but logits are kept, a host's memory of them, as they would come over it."""
        teacher = config.teacher
        wire = cast(Wire, teacher.wire) if signal == "logits" else "fp32"
        if signal == "topk":
            return ScoreParams(signal, teacher.topk, teacher.mass, teacher.temperature, self._n_vocab, wire)
        temperature = 1.0 if signal == "hidden" else teacher.temperature
        return ScoreParams(signal, temperature=temperature, n_vocab=self._n_vocab, wire=wire)

    def _scores(self, tables: Sequence[Table]) -> TeacherScores:
        """Of one sequence."""
        fields: dict[str, Any] = {}
        for signal, table in zip(self._signals, tables, strict=True):
            if isinstance(table, TopKScores):
                fields["topk"] = TeacherTopK(table.ids, table.logprobs, table.tail, table.counts)
            else:
                fields["sampled_logprobs" if signal == "sampled" else signal] = table
        return TeacherScores(**fields)


def stage_plans(student: Student, layout: ParallelLayout) -> list[list[TensorPlan]]:
    """By pipeline stage, what its ranks export; collective over the world."""
    plans: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(plans, (layout.pp_rank, student.export_plan()))
    by_stage = dict(plans)
    return [by_stage[stage] for stage in range(layout.pp)]


def whole_student(student: Student, layout: ParallelLayout, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """All tensors of the student, on every rank, stage after stage; collective over the world.

    A stage's ranks have its tensors from `Student.export`; the first of them sends each to all others.
    """
    if layout.pp == 1:
        yield from student.export()
        return
    for stage, plan in enumerate(stage_plans(student, layout)):
        own = student.export() if layout.pp_rank == stage else iter(())
        first = stage * layout.world_size // layout.pp  # see `ParallelLayout` for the order of ranks
        for name, shape, dtype in plan:
            mine = next(own, None)
            # What comes over what a stage's other ranks have is the same again.
            tensor = torch.empty(shape, dtype=dtype, device=device) if mine is None else mine[1].contiguous()
            dist.broadcast(tensor, src=first)
            yield name, tensor
        exhaust(own)
