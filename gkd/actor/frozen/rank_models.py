"""The frozen models of one actor rank, each optional: a local teacher and a reference, which may follow the student.

The models' module is imported when a model is built, because it imports transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from gkd.actor.common.agree import same_error
from gkd.actor.common.base import Student
from gkd.actor.common.host_copies import Snapshot
from gkd.config.schema import Config
from gkd.config.schema_teacher import WeightUpdates, weight_updates
from gkd.data.batching import check_batch, make_micro_batches
from gkd.errors import ConfigError, ModelError
from gkd.log import get_logger
from gkd.types import SIGNAL_FIELDS, Rollout, TeacherScores
from teacher_server.engines.base import ScoreParams
from teacher_server.wire.protocol import Signal, Wire
from teacher_server.wire.table import TopKTable

if TYPE_CHECKING:
    from gkd.actor.frozen.model import FrozenModel, Table

log = get_logger("frozen.follow")


class FrozenModels:
    """Build and call the frozen models. Every method but `device_bytes` and `add_to` is a collective over all ranks.

    Args:
        where: the rank's name, for errors.
    """

    def __init__(self, config: Config, student: Student, device: torch.device, where: str) -> None:
        self._config = config
        self._student = student
        self._device = device
        self._where = where
        self.teacher: LocalTeacher | None = None
        self._reference: FrozenModel | None = None
        self._followers: list[Follower] = []  # one for each model, in the order of the calls

    def init_teacher(self) -> None:
        """Build the local teacher; its student must be on the device. Raises as `LocalTeacher`."""
        self.teacher = LocalTeacher(self._config, self._student, self._device)
        self._followers.append(self.teacher.follower)

    def init_reference(self) -> None:
        """Build the reference. Raises as `FrozenModel` and `Follower`."""
        config = self._config
        derived = config.derived
        key = "reference.path" if config.reference.path else "model.path"
        self._reference = _built(config, self._device, derived.reference_folder, key, derived.max_sequence_length)
        self._followers.append(Follower(self._reference, self._student, weight_updates(config.reference)))

    def reference_logprobs(self, rollouts: Sequence[Rollout]) -> list[np.ndarray]:
        """Return the reference model's logprobs of each sequence's own tokens, [M] float32, nats.

        The logits of ids that the student does not have are dropped before the softmax.

        Args:
            rollouts: of this rank; may be empty.

        Raises:
            TeacherError: see `FrozenModel.score`.
        """
        assert self._reference is not None
        temperature = self._config.teacher.temperature
        params = ScoreParams("sampled", temperature=temperature, n_vocab=self._student.n_vocab)
        return [cast(np.ndarray, table) for (table,) in self._reference.score(rollouts, [params])]

    def student_logprobs(self, rollouts: Sequence[Rollout], *, disable_adapter: bool) -> list[np.ndarray]:
        """Return the student's logprobs of the same tokens.

        Args:
            rollouts: of this rank's data-parallel group; may be empty.
            disable_adapter: of the student without its adapters: the base model.

        Raises:
            ValueError: the student has no adapters.
            DataError: a sequence is invalid, see `check_batch`; on all ranks.
        """
        actor = self._config.actor
        student = self._student
        if disable_adapter and not actor.lora.rank:
            raise ValueError("disable_adapter: actor.lora.rank is 0, so the actor has no adapters")
        with same_error(self._device):
            check_batch(rollouts, None, where=self._where, n_vocab=student.n_vocab, signals=())
        batches = make_micro_batches(
            [replace(rollout, sample_index=i) for i, rollout in enumerate(rollouts)],
            None,
            micro_batch_size=actor.micro_batch_size,
            max_tokens=actor.max_tokens_per_micro_batch,
            packed=actor.packs,
        )
        tables = student.compute_logprobs(batches, disable_adapter=disable_adapter)
        indices = [index for index, _ in batches.samples]
        n_rows = [n for _, n in batches.samples]
        if not indices:
            return []
        rows = np.split(torch.cat(tables).numpy(), np.cumsum(n_rows)[:-1])
        return [rows[i] for i in np.argsort(indices)]

    def device_bytes(self) -> int:
        """Return the bytes of the models on this rank's device."""
        return sum(follower.model.device_bytes() for follower in self._followers)

    def after_step(self) -> None:
        """Let the models follow the student's training step, see `Follower.after_step`."""
        for follower in self._followers:
            follower.after_step()

    def add_to(self, snapshot: Snapshot) -> Snapshot:
        """Return the student's snapshot with the snapshots of the models that follow it. Not a collective."""
        for follower in self._followers:
            snapshot = follower.add_to(snapshot)
        return snapshot

    def load(self, folder: Path) -> None:
        """Load the models of a checkpoint that follow the student, see `Follower.load`."""
        for follower in self._followers:
            follower.load(folder)


class LocalTeacher:
    """Every method is a collective over the actor's ranks.

    Args:
        student: of this rank. With teacher.signal `hidden` it receives the teacher's LM head, now and at each refresh.

    Raises:
        ModelError, ConfigError: see `FrozenModel`; or ConfigError naming teacher.update_interval: student and teacher
            have different architectures.
    """

    def __init__(self, config: Config, student: Student, device: torch.device) -> None:
        self._student = student
        self._comparison = student.comparison
        self._n_vocab = student.comparison.n_listed or student.n_vocab
        derived = config.derived
        self.model = _built(config, device, config.teacher.path, "teacher.path", derived.max_teacher_length)
        self._signals = derived.signals
        self._n_student_ids = derived.n_student_ids
        # The top-k table also holds the logprobs of the response tokens.
        requested = ("topk",) if self._signals == ("topk", "sampled") else self._signals
        self._params = [self._score_params(config, signal) for signal in requested]
        self.follower = Follower(self.model, student, weight_updates(config.teacher), self._hand_over_head)
        self._hand_over_head()

    def score(self, rollouts: Sequence[Rollout]) -> list[TeacherScores]:
        """Return the scores of sequences of this rank. Raises TeacherError: see `FrozenModel.score`."""
        texts = self._comparison.for_teacher(rollouts)
        asked = [i for i, text in enumerate(texts) if len(text.response_ids)]
        tables = self.model.score([texts[i] for i in asked], self._params)
        scores = {i: self._scores(t) for i, t in zip(asked, tables, strict=True)}
        return list(self._comparison.completed(scores, texts).values())

    def _hand_over_head(self) -> None:
        if "hidden" in self._signals:
            self._student.set_teacher_head(self.model.lm_head()[: self._n_vocab])

    def _score_params(self, config: Config, signal: Signal) -> ScoreParams:
        """Return the scoring parameters of a signal. Logits have teacher.wire's precision to save host memory."""
        teacher = config.teacher
        wire = cast(Wire, teacher.wire) if signal == "logits" else "fp32"
        if signal == "topk":
            return ScoreParams(
                signal,
                teacher.topk,
                teacher.mass,
                teacher.temperature,
                self._n_vocab,
                wire,
                n_given=self._n_student_ids,
                with_sampled="sampled" in self._signals,
            )
        temperature = 1.0 if signal == "hidden" else teacher.temperature
        return ScoreParams(signal, temperature=temperature, n_vocab=self._n_vocab, wire=wire)

    def _scores(self, tables: Sequence[Table]) -> TeacherScores:
        """Return the scores of one sequence from its tables."""
        fields: dict[str, Any] = {}
        for params, table in zip(self._params, tables, strict=True):
            if isinstance(table, TopKTable):
                fields["topk"] = replace(table, sampled=None)
                fields["sampled_logprobs"] = table.sampled
            else:
                fields[SIGNAL_FIELDS[params.signal]] = table
        return TeacherScores(**fields)


def _built(config: Config, device: torch.device, folder: str, key: str, longest: int) -> FrozenModel:
    """Return the model of the section that `key` belongs to, or else the reference. Raises as `FrozenModel`."""
    from gkd.actor.frozen.model import FrozenModel

    actor = config.actor
    settings = config.teacher if key == "teacher.path" else config.reference
    return FrozenModel(
        folder,
        device=device,
        dtype=getattr(torch, config.model.dtype),
        key=key,
        cpu_offload=settings.fsdp_cpu_offload,
        packing=actor.packs,
        max_batch_tokens=actor.max_tokens_per_micro_batch or actor.micro_batch_size * longest,
        float32_weights=weight_updates(settings).ema > 0.0,
        trust_remote_code=config.model.trust_remote_code,
        vision=config.derived.vision,
    )


class Follower:
    """Update a frozen model's weights from the student's. Its methods are collectives of all ranks.

    Args:
        updates: without any the model is not part of checkpoints.
        changed: called after each change of the weights.

    Raises:
        ConfigError: naming `weights` of the model's section: model and student have different architectures.
    """

    def __init__(
        self,
        model: FrozenModel,
        student: Student,
        updates: WeightUpdates,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        self.model = model
        self._student = student
        (self._interval, self._ema), self._changed = updates, changed
        if not self._interval:
            return
        try:
            model.check_plan([spec for stage in student.stage_plans() for spec in stage])
        except ModelError as error:
            fix = f"use 0, or a {model.role}.path of the student's architecture."
            raise ConfigError(f"{model.role}.update_interval", updates.interval, f"{error}.", fix) from error

    def after_step(self) -> None:
        """Refresh the model if it is due; call it after each step of the student."""
        if not self._interval or self._student.step % self._interval:
            return
        self.model.refresh(self._student.export_whole(self._student.stage_plans()), self._ema)
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
