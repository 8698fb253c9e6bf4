"""The Ray surface of one scoring endpoint: asks the teacher for one data-parallel group, on that group's host.

It has no GPU and loads no torch: tokens come from the object store, go to the teacher over ZMQ, and the scores go
into the object store of this host, where the group's last pipeline stage maps them without a copy. What is asked of
each sequence follows from teacher.signal and the loss (`gkd.config.loss_spec.teacher_signals`).
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import Any, cast

import numpy as np

from gkd.config.derived import derive
from gkd.config.schema import Config
from gkd.errors import TeacherError, TeacherUnavailable
from gkd.handles import ScoreTimes
from gkd.teacher.client import ZmqTeacher
from gkd.teacher.records import RecordingEndpoint, summary_of
from gkd.types import Rollout, TeacherScores
from teacher_server.wire.protocol import Signal, Wire

_FIELDS: dict[Signal, str] = {"topk": "topk", "sampled": "sampled_logprobs", "hidden": "hidden"}


class ScoringEndpoint(RecordingEndpoint):
    """One data-parallel group's way to the teacher: one client, which scores several chunks at a time, one a thread.

    Args:
        config: the run's settings.
        n_vocab: ids that student and teacher have in common; the teacher's other rows are cut before it normalises.
        fingerprint: of the teacher that preflight met; no other one's scores are used.
        n_in_flight: requests that it keeps at the server, over all threads.

    Raises:
        ConfigError: the loss is not one that `gkd.config.check` lets pass.
    """

    def __init__(self, config: Config, n_vocab: int, fingerprint: str, n_in_flight: int) -> None:
        super().__init__(config)
        self._n_vocab, self._fingerprint, self._n_in_flight = n_vocab, fingerprint, n_in_flight
        self._signals = derive(config).signals
        self._lock = threading.Lock()
        self._teacher: ZmqTeacher | None = None
        self._gone: TeacherUnavailable | None = None

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
                    k=teacher.topk if "topk" in self._signals else 1,
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

    def score(self, rollouts: Sequence[Rollout]) -> tuple[list[TeacherScores], bytes]:
        """Blocks until every sequence is scored; the client checks the scores. After an error nothing of it is left
        running.

        Two objects come back; the driver fetches only the second.

        Returns:
            Scores in the order of `rollouts`, with the tables that the loss needs; `ScoreSummary.encode` of them.

        Raises:
            TeacherError, TeacherUnavailable: see `gkd.teacher.base.Teacher.score`.
        """
        if self._gone is not None:  # the run ends: what waited for a thread must not wait for the teacher once more
            raise self._gone
        teacher = self._client()
        submitted_s = time.time()
        completed_s = [submitted_s] * len(rollouts)
        try:
            if self._signals == ("logits",):
                # One stream a thread: each sequence's rows are large, and what came too early would wait in memory.
                scores = []
                for index, rollout in enumerate(rollouts):
                    scores.append(TeacherScores(logits=self._logits(teacher, rollout)))
                    completed_s[index] = time.time()
            else:
                scores = self._all_at_once(teacher, rollouts, completed_s)
        except TeacherUnavailable as error:
            self._gone = error
            raise
        return scores, summary_of(scores, ScoreTimes(submitted_s, tuple(completed_s))).encode()

    def lm_head(self) -> np.ndarray:
        """[n_vocab, D] float32: hidden states @ lm_head.T are the teacher's logits, not yet divided by the temperature.

        For the actor, once; it is not kept here.

        Raises:
            TeacherError, TeacherUnavailable: as of `score`; also if it has fewer rows or a NaN or an infinity.
        """
        head = self._client().lm_head()
        if len(head) < self._n_vocab:
            raise TeacherError(f"the teacher's LM head has {len(head)} rows, expected at least {self._n_vocab}")
        head = head[: self._n_vocab]
        if not np.isfinite(head.sum(dtype=np.float64)):  # finite float32 numbers cannot overflow it
            raise TeacherError("the teacher's LM head holds a NaN or an infinity")
        return head

    def _all_at_once(
        self, teacher: ZmqTeacher, rollouts: Sequence[Rollout], completed_s: list[float]
    ) -> list[TeacherScores]:
        """Every request of every sequence handed to the client, which keeps `n_in_flight` of them at the server.

        Writes into `completed_s` when each sequence's last answer came.
        """
        asked: list[tuple[int, str, Future[Any]]] = []  # (sequence, field of TeacherScores, its table)
        try:
            for index, rollout in enumerate(rollouts):
                for signal in self._signals:
                    future = self._submit(teacher, rollout, signal)
                    future.add_done_callback(functools.partial(_note_time, completed_s, index))
                    asked.append((index, _FIELDS[signal], future))
            for future in wait([future for *_, future in asked], return_when=FIRST_EXCEPTION).done:
                future.result()  # raises what ended the wait early
            tables: list[dict[str, Any]] = [{} for _ in rollouts]
            for index, field, future in asked:
                tables[index][field] = future.result()
        finally:
            for *_, future in asked:
                future.cancel()
        return [TeacherScores(**fields) for fields in tables]

    def _submit(self, teacher: ZmqTeacher, rollout: Rollout, signal: Signal) -> Future[Any]:
        if signal == "topk":
            return teacher.submit(rollout, mass=self._config.teacher.mass)
        return teacher.submit_sampled(rollout) if signal == "sampled" else teacher.submit_hidden(rollout)

    def _logits(self, teacher: ZmqTeacher, rollout: Rollout) -> np.ndarray:
        """[R, n_vocab]; float16 where the wire has no more than that, so nothing is lost."""
        dtype = np.float16 if self._config.teacher.wire == "fp16" else np.float32
        logits = np.empty((len(rollout.response_ids), self._n_vocab), dtype)
        for start, rows in teacher.logits(rollout):
            logits[start : start + len(rows)] = rows
        return logits


def _note_time(completed_s: list[float], index: int, _: Future[Any]) -> None:
    completed_s[index] = time.time()
