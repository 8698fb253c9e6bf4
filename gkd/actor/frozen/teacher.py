"""One rank of the local teacher: score rollouts with the signals that the loss requires, and follow the student.

Data flow of a batch: rollout -> *teacher scores* -> micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch

from gkd.actor.common.base import Student
from gkd.actor.frozen.follow import Follower
from gkd.actor.frozen.model import FrozenModel, Table
from gkd.actor.megatron.layout import ParallelLayout
from gkd.config.schema import Config
from gkd.config.schema_teacher import weight_updates
from gkd.data.scatter import map_selected
from gkd.text.pair import TokenizerPair
from gkd.types import SIGNAL_FIELDS, Rollout, TeacherScores, TeacherTopK
from teacher_server.engines.base import ScoreParams
from teacher_server.wire.payload import TopKScores
from teacher_server.wire.protocol import Signal, Wire


class LocalTeacher:
    """Every method is a collective over the actor's ranks.

    Args:
        student: of this rank. With teacher.signal `hidden` it receives the teacher's LM head, now and at each refresh.
        layout: of the student, which maps pipeline stages to ranks.
        pair: tokenizers of the student and of a teacher with another one.

    Raises:
        ModelError, ConfigError: see `FrozenModel`; or ConfigError naming teacher.update_interval: student and teacher
            have different architectures.
    """

    def __init__(
        self,
        config: Config,
        student: Student,
        layout: ParallelLayout,
        device: torch.device,
        pair: TokenizerPair | None = None,
    ) -> None:
        teacher, actor = config.teacher, config.actor
        self._student, self._n_vocab = student, student.n_vocab if pair is None else len(pair.teacher)
        self._pair, self._units = pair, config.distill.units
        derived, updates = config.derived, weight_updates(teacher)
        self.model = FrozenModel(
            teacher.path,
            device=device,
            dtype=getattr(torch, config.model.dtype),
            key="teacher.path",
            cpu_offload=teacher.fsdp_cpu_offload,
            packing=actor.packing,
            max_batch_tokens=actor.max_tokens_per_micro_batch or actor.micro_batch_size * derived.max_teacher_length,
            float32_weights=updates.ema > 0.0,
            trust_remote_code=config.model.trust_remote_code,
        )
        self._signals, self._n_student_ids = derived.signals, derived.n_student_ids
        # The top-k table also holds the logprobs of the response tokens.
        requested = ("topk",) if self._signals == ("topk", "sampled") else self._signals
        self._params = [self._score_params(config, each) for each in requested]
        self.follower = Follower(self.model, student, layout, device, updates, self._hand_over_head)
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
        return map_selected(sequence_indices, chunks, self._of_sequences)

    def _of_sequences(self, rollouts: Sequence[Rollout]) -> list[TeacherScores]:
        if self._pair is None:
            return [self._scores(t) for t in self.model.score([r.for_teacher() for r in rollouts], self._params)]
        texts = self._pair.for_teacher(rollouts)
        asked = [i for i, text in enumerate(texts) if len(text.response_ids)]
        tables = self.model.score([texts[i] for i in asked], self._params)
        found = {i: self._scores(each) for i, each in zip(asked, tables, strict=True)}
        return list(self._pair.completed(found, texts, self._hidden_size).values())

    def _hand_over_head(self) -> None:
        if "hidden" in self._signals:
            head = self.model.lm_head()[: self._n_vocab]
            self._hidden_size = head.shape[1]
            self._student.set_teacher_head(head, self._pair, self._units)

    def _score_params(self, config: Config, signal: Signal) -> ScoreParams:
        """Return the scoring parameters of a signal. Logits have teacher.wire's precision to save host memory."""
        teacher = config.teacher
        wire = cast(Wire, teacher.wire) if signal == "logits" else "fp32"
        if signal == "topk":
            with_sampled = "sampled" in self._signals
            return ScoreParams(
                signal,
                teacher.topk,
                teacher.mass,
                teacher.temperature,
                self._n_vocab,
                wire,
                n_given=self._n_student_ids,
                with_sampled=with_sampled,
            )
        temperature = 1.0 if signal == "hidden" else teacher.temperature
        return ScoreParams(signal, temperature=temperature, n_vocab=self._n_vocab, wire=wire)

    def _scores(self, tables: Sequence[Table]) -> TeacherScores:
        """Return the scores of one sequence from its tables."""
        fields: dict[str, Any] = {}
        for params, table in zip(self._params, tables, strict=True):
            if isinstance(table, TopKScores):
                fields["topk"] = TeacherTopK(table.ids, table.logprobs, table.tail, table.counts)
                fields["sampled_logprobs"] = table.sampled
            else:
                fields[SIGNAL_FIELDS[params.signal]] = table
        return TeacherScores(**fields)
