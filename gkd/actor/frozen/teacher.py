"""One rank of the local teacher: score rollouts with the signals that the loss requires, and follow the student.

Data flow of a batch: rollout -> *teacher scores* -> micro-batches.
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
from gkd.types import SIGNAL_FIELDS, Rollout, TeacherScores, TeacherTopK
from teacher_server.engines.base import ScoreParams
from teacher_server.wire.payload import TopKScores
from teacher_server.wire.protocol import Signal, Wire

log = get_logger("frozen.teacher")


class LocalTeacher:
    """Every method is a collective over the actor's ranks.

    Args:
        student: of this rank. With teacher.signal `hidden` it receives the teacher's LM head, now and at each refresh.
        layout: of the student, which maps pipeline stages to ranks.
        n_vocab: ids that student and teacher share; the teacher's other logits are dropped before the softmax.

    Raises:
        ModelError, ConfigError: see `FrozenModel`; or ConfigError naming teacher.update_interval: student and teacher
            have different architectures.
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
        self._params = [self._score_params(config, each) for each in self._signals]
        if self._interval:
            self._check_can_follow()
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
        by_chunk = map_selected(sequence_indices, chunks, lambda rollouts: self._model.score(rollouts, self._params))
        return [[self._scores(tables) for tables in part] for part in by_chunk]

    def device_bytes(self) -> int:
        """Return the bytes on this rank's device, see `FrozenModel.device_bytes`."""
        return self._model.device_bytes()

    def after_step(self) -> None:
        """Copy the student's weights every teacher.update_interval steps; call it after each step of the student."""
        if self._interval and self._student.step % self._interval == 0:
            self._refresh()

    def add_to(self, student: Snapshot) -> Snapshot:
        """Return the student's snapshot, joined with this rank's rows of the teacher if it follows the student.

        Not a collective. The copy to host memory is started; the next refresh waits for it.
        """
        return student.join(self._model.snapshot()) if self._interval else student

    def load(self, folder: Path) -> None:
        """Load the teacher from a checkpoint of any number of ranks; no-op if it does not follow the student.

        Raises:
            CheckpointError: the checkpoint has no teacher or a different one, see `gkd.actor.frozen.checkpoint.load`.
        """
        if self._interval:
            self._model.load(folder)
            self._hand_over_head()

    def _refresh(self) -> None:
        self._model.refresh(whole_student(self._student, self._layout, self._device), self._ema)
        self._hand_over_head()
        log.info("step %d: refreshed the teacher from the student (ema %g)", self._student.step, self._ema)

    def _check_can_follow(self) -> None:
        plan = [spec for stage in stage_plans(self._student, self._layout) for spec in stage]
        try:
            self._model.check_plan(plan)
        except ModelError as error:
            fix = "use 0, or a teacher.path of the student's architecture."
            raise ConfigError("teacher.update_interval", self._interval, f"{error}.", fix) from error

    def _hand_over_head(self) -> None:
        if "hidden" in self._signals:
            self._student.set_teacher_head(self._model.lm_head()[: self._n_vocab])

    def _score_params(self, config: Config, signal: Signal) -> ScoreParams:
        """Return the scoring parameters of a signal. Logits have teacher.wire's precision to save host memory."""
        teacher = config.teacher
        wire = cast(Wire, teacher.wire) if signal == "logits" else "fp32"
        if signal == "topk":
            return ScoreParams(signal, teacher.topk, teacher.mass, teacher.temperature, self._n_vocab, wire)
        temperature = 1.0 if signal == "hidden" else teacher.temperature
        return ScoreParams(signal, temperature=temperature, n_vocab=self._n_vocab, wire=wire)

    def _scores(self, tables: Sequence[Table]) -> TeacherScores:
        """Return the scores of one sequence from its tables."""
        fields: dict[str, Any] = {}
        for signal, table in zip(self._signals, tables, strict=True):
            if isinstance(table, TopKScores):
                fields["topk"] = TeacherTopK(table.ids, table.logprobs, table.tail, table.counts)
            else:
                fields[SIGNAL_FIELDS[signal]] = table
        return TeacherScores(**fields)


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
