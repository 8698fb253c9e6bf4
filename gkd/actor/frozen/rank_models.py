"""The frozen models of one actor rank: a local teacher and a reference, each optional."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from gkd.actor.common.base import Student
from gkd.actor.common.host_copies import Snapshot
from gkd.actor.megatron.layout import ParallelLayout
from gkd.config.schema import Config
from gkd.config.schema_teacher import weight_updates
from gkd.text.pair import TokenizerPair
from gkd.types import Rollout, TeacherScores

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
        self._followers: list[LocalTeacher | Follower] = []  # models that follow the student, in the order of the calls

    def init_teacher(self, pair: TokenizerPair | None = None) -> None:
        """Build the local teacher; its student must be on the device. Raises as `LocalTeacher`."""
        from gkd.actor.frozen.teacher import LocalTeacher

        self._teacher = LocalTeacher(self._config, self._student, self._layout, self._device, pair)
        self._followers.append(self._teacher)

    def init_reference(self) -> None:
        """Build the reference. Raises as `FrozenModel` and `Follower`."""
        from gkd.actor.frozen.follow import Follower
        from gkd.actor.frozen.reference import frozen_reference

        self._reference, updates = frozen_reference(self._config, self._device), weight_updates(self._config.reference)
        self._followers.append(Follower(self._reference, self._student, self._layout, self._device, updates))

    def score(
        self, sequence_indices: Sequence[bytes | None], chunks: Sequence[list[Rollout]]
    ) -> list[list[TeacherScores]]:
        """Return the teacher's scores, see `LocalTeacher.score`."""
        assert self._teacher is not None
        return self._teacher.score(sequence_indices, chunks)

    def reference_logprobs(self, rollouts: Sequence[Rollout]) -> list[np.ndarray]:
        """Return the reference model's logprobs of sequences, see `frozen_logprobs`."""
        from gkd.actor.frozen.reference import frozen_logprobs

        assert self._reference is not None
        temperature, n_vocab = self._config.teacher.temperature, self._student.n_vocab
        return frozen_logprobs(self._reference, rollouts, temperature=temperature, n_vocab=n_vocab)

    def student_logprobs(self, *, disable_adapter: bool) -> Callable[[list[Rollout]], list[np.ndarray]]:
        """Return the collective that computes the student's logprobs of sequences, see `student_logprobs`.

        Args:
            disable_adapter: without the adapters.

        Raises:
            ValueError: the student has no adapters.
        """
        from gkd.actor.frozen.reference import student_logprobs

        if disable_adapter and not self._config.actor.lora.rank:
            raise ValueError("disable_adapter: actor.lora.rank is 0, so the actor has no adapters")
        return partial(
            student_logprobs,
            self._student,
            self._config,
            disable_adapter=disable_adapter,
            device=self._device,
            where=self._where,
        )

    def device_bytes(self) -> int:
        """Return the bytes of the models on this rank's device."""
        return sum(model.device_bytes() for model in (self._teacher, self._reference) if model is not None)

    def after_step(self) -> None:
        """Let the models follow the student's training step, see `Follower.after_step`."""
        for model in self._followers:
            model.after_step()

    def add_to(self, snapshot: Snapshot) -> Snapshot:
        """Return the student's snapshot with the snapshots of the models that follow it. Not a collective."""
        for model in self._followers:
            snapshot = model.add_to(snapshot)
        return snapshot

    def load(self, folder: Path) -> None:
        """Load the models of a checkpoint that follow the student, see `Follower.load`."""
        for model in self._followers:
            model.load(folder)
