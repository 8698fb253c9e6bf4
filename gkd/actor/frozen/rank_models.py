"""The frozen models of one actor rank: a local teacher and a reference, each optional."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
import torch

from gkd.actor.common.agree import same_error
from gkd.actor.common.base import Student
from gkd.actor.common.host_copies import Snapshot
from gkd.actor.megatron.layout import ParallelLayout
from gkd.config.schema import Config
from gkd.config.schema_teacher import weight_updates
from gkd.data.batching import check_batch, make_micro_batches
from gkd.text.pair import TokenizerPair
from gkd.types import Rollout, TeacherScores
from teacher_server.engines.base import ScoreParams

if TYPE_CHECKING:
    from gkd.actor.frozen.follow import Follower
    from gkd.actor.frozen.model import FrozenModel
    from gkd.actor.frozen.teacher import LocalTeacher


class FrozenModels:
    """Build and call the frozen models. Every method but `device_bytes` and `add_to` is a collective over all ranks.

    The models' modules are imported when a model is built, because they import transformers.

    Args:
        where: the rank's name, for errors.
    """

    def __init__(
        self, config: Config, student: Student, layout: ParallelLayout, device: torch.device, where: str
    ) -> None:
        self._config, self._student, self._layout, self._device = config, student, layout, device
        self._where = where
        self._teacher: LocalTeacher | None = None
        self._reference: FrozenModel | None = None
        self._followers: list[Follower] = []  # one for each model, in the order of the calls

    def init_teacher(self, pair: TokenizerPair | None = None) -> None:
        """Build the local teacher; its student must be on the device. Raises as `LocalTeacher`."""
        from gkd.actor.frozen.teacher import LocalTeacher

        self._teacher = LocalTeacher(self._config, self._student, self._layout, self._device, pair)
        self._followers.append(self._teacher.follower)

    def init_reference(self) -> None:
        """Build the reference. Raises as `FrozenModel` and `Follower`."""
        from gkd.actor.frozen.follow import Follower
        from gkd.actor.frozen.model import FrozenModel

        config, actor, derived = self._config, self._config.actor, self._config.derived
        self._reference = FrozenModel(
            derived.reference_folder,
            device=self._device,
            dtype=getattr(torch, config.model.dtype),
            key="reference.path" if config.reference.path else "model.path",
            cpu_offload=config.reference.fsdp_cpu_offload,
            packing=actor.packing,
            max_batch_tokens=actor.max_tokens_per_micro_batch or actor.micro_batch_size * derived.max_sequence_length,
            trust_remote_code=config.model.trust_remote_code,
        )
        updates = weight_updates(config.reference)
        self._followers.append(Follower(self._reference, self._student, self._layout, self._device, updates))

    def score(
        self, sequence_indices: Sequence[bytes | None], chunks: Sequence[list[Rollout]]
    ) -> list[list[TeacherScores]]:
        """Return the teacher's scores, see `LocalTeacher.score`."""
        assert self._teacher is not None
        return self._teacher.score(sequence_indices, chunks)

    def reference_logprobs(self, rollouts: Sequence[Rollout]) -> list[np.ndarray]:
        """Return the reference model's logprobs of each sequence's own tokens, [M] float32, nats.

        The logits of ids that the student does not have are dropped before the softmax.

        Args:
            rollouts: of this rank; may be empty.

        Raises:
            TeacherError: see `FrozenModel.score`.
        """
        assert self._reference is not None
        temperature, n_vocab = self._config.teacher.temperature, self._student.n_vocab
        params = ScoreParams("sampled", temperature=temperature, n_vocab=n_vocab)
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
        actor, student = self._config.actor, self._student
        if disable_adapter and not actor.lora.rank:
            raise ValueError("disable_adapter: actor.lora.rank is 0, so the actor has no adapters")
        with same_error(self._device):
            check_batch(rollouts, None, where=self._where, n_vocab=student.n_vocab, signals=())
        batches = make_micro_batches(
            [replace(rollout, sample_index=i) for i, rollout in enumerate(rollouts)],
            None,
            micro_batch_size=actor.micro_batch_size,
            max_tokens=actor.max_tokens_per_micro_batch,
            packed=actor.packing,
        )
        tables = student.compute_logprobs(batches, disable_adapter=disable_adapter)
        indices, n_rows = [index for index, _ in batches.samples], [n for _, n in batches.samples]
        if not indices:
            return []
        rows = np.split(torch.cat(tables).numpy(), np.cumsum(n_rows)[:-1])
        return [rows[i] for i in np.argsort(indices)]

    def device_bytes(self) -> int:
        """Return the bytes of the models on this rank's device."""
        return sum(each.model.device_bytes() for each in self._followers)

    def after_step(self) -> None:
        """Let the models follow the student's training step, see `Follower.after_step`."""
        for each in self._followers:
            each.after_step()

    def add_to(self, snapshot: Snapshot) -> Snapshot:
        """Return the student's snapshot with the snapshots of the models that follow it. Not a collective."""
        for each in self._followers:
            snapshot = each.add_to(snapshot)
        return snapshot

    def load(self, folder: Path) -> None:
        """Load the models of a checkpoint that follow the student, see `Follower.load`."""
        for each in self._followers:
            each.load(folder)
