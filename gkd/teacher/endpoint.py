"""The Ray surface of one scoring endpoint: asks the teacher for one data-parallel group, on that group's host.

It has no GPU and loads no torch: tokens come from the object store, go to the teacher over ZMQ, and the scores go
into the object store of this host, where the group's last pipeline stage maps them without a copy.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import cast

import numpy as np

from gkd.config import Config
from gkd.errors import TeacherError
from gkd.teacher.client import ZmqTeacher
from gkd.types import Rollout, TeacherTopK
from teacher_server.protocol import Wire


@dataclass(frozen=True, slots=True)
class ScoreSummary:
    """What the driver learns of a chunk's scores."""

    mass: float  # sum over positions of the teacher's probability on its top-k
    n_bytes: int


class ScoringEndpoint:
    """One data-parallel group's way to the teacher: one client, which scores several chunks at a time, one a thread.

    Args:
        config: the run's settings.
        n_vocab: ids that student and teacher have in common; the teacher's other rows are cut before it normalises.
        fingerprint: of the teacher that preflight met; no other one's scores are used.
        n_in_flight: sequences that it keeps at the server, over all threads.
    """

    def __init__(self, config: Config, n_vocab: int, fingerprint: str, n_in_flight: int) -> None:
        self._config, self._n_vocab, self._fingerprint, self._n_in_flight = config, n_vocab, fingerprint, n_in_flight
        self._lock = threading.Lock()
        self._teacher: ZmqTeacher | None = None

    def is_up(self) -> bool:
        """Answers once the process runs. Raises ConfigError if teacher.keys cannot be read on this host."""
        self._client()
        return True

    def _client(self) -> ZmqTeacher:
        teacher = self._config.teacher
        with self._lock:
            if self._teacher is None:
                self._teacher = ZmqTeacher(
                    teacher.server_ip,
                    teacher.server_port,
                    k=teacher.topk,
                    temperature=teacher.temperature,
                    n_vocab=self._n_vocab,
                    n_in_flight=self._n_in_flight,
                    request_timeout_s=teacher.request_timeout_s,
                    outage_budget_s=teacher.outage_budget_s,
                    wire=cast(Wire, teacher.wire),
                    expected_fingerprint=self._fingerprint,
                    name=teacher.name,
                    keys=teacher.keys,
                )
            return self._teacher

    def score(self, rollouts: list[Rollout]) -> tuple[list[TeacherTopK], ScoreSummary]:
        """Blocks until every sequence is scored; the client checks the scores.

        Two objects come back; the driver fetches only the second.

        Raises:
            TeacherError, TeacherUnavailable: see `gkd.teacher.base.Teacher.score`.
        """
        scores: list[TeacherTopK | None] = [None] * len(rollouts)
        for index, score in self._client().score(rollouts):
            scores[index] = score
        complete = [score for score in scores if score is not None]
        if len(complete) != len(rollouts):
            raise TeacherError(f"the teacher's client answered {len(complete)} of {len(rollouts)} sequences")
        mass = sum(float(np.exp(s.topk_logprobs, dtype=np.float64).sum()) for s in complete)
        n_bytes = sum(s.topk_ids.nbytes + s.topk_logprobs.nbytes + s.tail_mass.nbytes for s in complete)
        return complete, ScoreSummary(mass, n_bytes)
