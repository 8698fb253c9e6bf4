"""Ray actor of one scoring endpoint: scores the rollouts of one data-parallel group with the teacher server.

Runs on the group's host without GPU and torch. Tokens come from the object store and go to the teacher over ZMQ. The
scores go to the object store of this host, where the group's last pipeline stage maps them without a copy. Which
signals are requested follows from teacher.signal and the loss (`gkd.config.loss_spec.teacher_signals`).
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
from gkd.handles import Computation, ScoreTimes, TeacherHealth
from gkd.teacher.client import ZmqTeacher
from gkd.teacher.computations import Computations
from gkd.teacher.outage import merged
from gkd.teacher.records import RecordingEndpoint, summary_of
from gkd.teacher.window import Window
from gkd.types import SIGNAL_FIELDS, Rollout, TeacherScores
from teacher_server.wire.protocol import Signal, Wire


class ScoringEndpoint(RecordingEndpoint):
    """Client of one data-parallel group. Scores several chunks concurrently, one per thread.

    Args:
        config: the run's settings.
        n_vocab: size of the common vocabulary; the teacher drops its other rows before it normalizes.
        fingerprint: of the teacher that preflight checked; scores of another teacher are refused.
        window: connections to the server, and the maximum number of requests on each, over all threads.

    Raises:
        ConfigError: invalid loss settings.
    """

    def __init__(self, config: Config, n_vocab: int, fingerprint: str, window: Window) -> None:
        super().__init__(config)
        self._n_vocab, self._fingerprint, self._window = n_vocab, fingerprint, window
        self._signals = derive(config).signals
        self._lock = threading.Lock()
        self._teachers: list[ZmqTeacher] = []
        self._outage: TeacherUnavailable | None = None
        self._computations = Computations()

    def is_up(self) -> bool:
        """Return once the process runs. Raises ConfigError: teacher.keys cannot be read on this host."""
        self._clients()
        return True

    def _clients(self) -> list[ZmqTeacher]:
        """Return the connections; the first call opens them."""
        with self._lock:
            while len(self._teachers) < self._window.n_connections:
                self._teachers.append(self._connect())
            return self._teachers

    def _connect(self) -> ZmqTeacher:
        teacher = self._config.teacher
        return ZmqTeacher(
            teacher.server_ip,
            teacher.server_port,
            k=teacher.topk if "topk" in self._signals else 1,
            temperature=teacher.temperature,
            n_vocab=self._n_vocab,
            n_in_flight=self._window.n_per_connection,
            request_timeout_s=teacher.request_timeout_s,
            outage_budget_s=teacher.outage_budget_s,
            wire=cast(Wire, teacher.wire),
            expected_fingerprint=self._fingerprint,
            name=teacher.name,
            keys=teacher.keys,
            on_scored=self._computations.note,
        )

    def take_computations(self) -> list[Computation]:
        """Return what the teacher has computed for this endpoint since the last call."""
        return self._computations.take()

    def score(self, rollouts: Sequence[Rollout]) -> tuple[list[TeacherScores], bytes]:
        """Score a chunk; blocks. After an error all its requests are cancelled.

        Returns:
            Scores in the order of `rollouts`, with the tables that the loss needs, and their encoded `ScoreSummary`.
            These are two Ray objects; the driver fetches only the second.

        Raises:
            TeacherError, TeacherUnavailable: see `gkd.teacher.base.Teacher.score`.
        """
        if self._outage is not None:  # the run is ending: queued chunks must not wait for the teacher again
            raise self._outage
        teachers = self._clients()
        submitted_s = time.time()
        completed_s = [submitted_s] * len(rollouts)
        try:
            if self._signals == ("logits",):
                # One sequence at a time: its rows are large, and prefetched ones would occupy memory.
                scores = []
                for index, rollout in enumerate(rollouts):
                    scores.append(TeacherScores(logits=self._logits(teachers[0], rollout)))
                    completed_s[index] = time.time()
            else:
                scores = self._request_all(teachers, rollouts, completed_s)
        except TeacherUnavailable as error:
            self._outage = error
            raise
        return scores, summary_of(scores, ScoreTimes(submitted_s, tuple(completed_s))).encode()

    def health(self) -> TeacherHealth | None:
        """Return what all connections of this endpoint have heard; None: it has not connected yet."""
        return merged([teacher.health() for teacher in self._teachers])

    def lm_head(self) -> np.ndarray:
        """Return the LM head, [n_vocab, D] float32; hidden states @ lm_head.T = logits before the temperature.

        Called once, for the actor; not cached.

        Raises:
            TeacherError, TeacherUnavailable: as for `score`; also if it has too few rows or non-finite values.
        """
        head = self._clients()[0].lm_head()
        if len(head) < self._n_vocab:
            raise TeacherError(f"the teacher's LM head has {len(head)} rows, expected at least {self._n_vocab}")
        head = head[: self._n_vocab]
        if not np.isfinite(head.sum(dtype=np.float64)):  # finite float32 values cannot overflow a float64 sum
            raise TeacherError("the teacher's LM head contains NaN or infinity")
        return head

    def _request_all(
        self, teachers: Sequence[ZmqTeacher], rollouts: Sequence[Rollout], completed_s: list[float]
    ) -> list[TeacherScores]:
        """Submit all requests of all sequences and wait; write each sequence's completion time to `completed_s`."""
        requests: list[tuple[int, str, Future[Any]]] = []  # (sequence, field of TeacherScores, table)
        try:
            for index, rollout in enumerate(rollouts):
                for signal in self._signals:
                    future = self._submit(teachers[index % len(teachers)], rollout, signal)
                    future.add_done_callback(functools.partial(_record_time, completed_s, index))
                    requests.append((index, SIGNAL_FIELDS[signal], future))
            for future in wait([future for *_, future in requests], return_when=FIRST_EXCEPTION).done:
                future.result()  # raises the error that ended the wait
            tables: list[dict[str, Any]] = [{} for _ in rollouts]
            for index, field, future in requests:
                tables[index][field] = future.result()
        finally:
            for *_, future in requests:
                future.cancel()
        return [TeacherScores(**fields) for fields in tables]

    def _submit(self, teacher: ZmqTeacher, rollout: Rollout, signal: Signal) -> Future[Any]:
        if signal == "topk":
            return teacher.submit(rollout, mass=self._config.teacher.mass)
        return teacher.submit_sampled(rollout) if signal == "sampled" else teacher.submit_hidden(rollout)

    def _logits(self, teacher: ZmqTeacher, rollout: Rollout) -> np.ndarray:
        """Return [R, n_vocab] in the precision of the wire: float16 or float32."""
        dtype = np.float16 if self._config.teacher.wire == "fp16" else np.float32
        logits = np.empty((len(rollout.response_ids), self._n_vocab), dtype)
        for start, rows in teacher.logits(rollout):
            logits[start : start + len(rows)] = rows
        return logits


def _record_time(completed_s: list[float], index: int, _: Future[Any]) -> None:
    completed_s[index] = time.time()
