"""Client of the teacher server, a `gkd.scoring.teacher.teacher.Teacher`.

    ZmqTeacher -> requests         build a request; check the replies
               -> exchange         one thread: window of requests in flight, resends
               -> link, outage     connection and heartbeats; when to give up

Thread-safe. Imports numpy and zmq, but not torch.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, cast

import numpy as np

from gkd.config.schema_teacher import TeacherConfig
from gkd.errors import ConfigError
from gkd.scoring.teacher.exchange import ClientStats, Exchange, OnScored
from gkd.scoring.teacher.info import TeacherInfo
from gkd.scoring.teacher.link import TeacherLink
from gkd.scoring.teacher.outage import OutageClock
from gkd.scoring.teacher.requests import (
    DescriptionRequest,
    MatrixRequest,
    PendingRequest,
    RequestSettings,
    ScoresRequest,
    T,
)
from gkd.types import Rollout, TeacherHealth, TeacherScores
from teacher_server.wire.protocol import Signal, Wire

if TYPE_CHECKING:
    from teacher_server.wire.keys import PeerKeys

MAX_WAITING = 4096


class ZmqTeacher:
    """A teacher at `teacher.server_ip:server_port`. Thread-safe.

    Methods and futures raise TeacherUnavailable if the server sent no reply, or no scores, within the budgets; the
    client remains usable. They raise another TeacherError if a request was refused, scores are invalid, or the client
    is closed.

    Args:
        teacher: the settings, already checked. A request without a reply is sent again after request_timeout_s. The
            client gives up if no message at all arrived for outage_budget_s, or if the server is alive but returned no
            scores for that long plus request_timeout_s.
        k, n_vocab, n_in_flight, fingerprint, on_scored, units: see `gkd.scoring.teacher.teacher.open_teacher`.
        outage_budget_s: replaces the setting.
        max_waiting: requests waiting in the client before a further one blocks.

    Raises:
        ConfigError: the keys or the address are invalid.
    """

    def __init__(
        self,
        teacher: TeacherConfig,
        *,
        k: int,
        n_vocab: int,
        n_in_flight: int,
        fingerprint: str = "",
        outage_budget_s: float | None = None,
        max_waiting: int = MAX_WAITING,
        on_scored: OnScored | None = None,
        units: np.ndarray | None = None,
    ) -> None:
        wire, resend_s = cast(Wire, teacher.wire), teacher.request_timeout_s
        self._settings = RequestSettings(teacher.name, k, teacher.temperature, n_vocab, wire, resend_s, units)
        self._info: TeacherInfo | None = None
        budget_s = teacher.outage_budget_s if outage_budget_s is None else outage_budget_s
        clock = OutageClock(outage_budget_s=budget_s, stall_budget_s=budget_s + resend_s)
        link = TeacherLink(teacher.server_ip, teacher.server_port, clock, load_keys(teacher.keys))
        self._exchange = Exchange(
            link, n_in_flight=n_in_flight, max_waiting=max_waiting, fingerprint=fingerprint, on_scored=on_scored
        )

    def __enter__(self) -> ZmqTeacher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Fail all pending requests and close, without waiting for the server. Idempotent."""
        self._exchange.close()

    @property
    def stats(self) -> ClientStats:
        """Return the live counters of this client."""
        return self._exchange.stats

    def health(self) -> TeacherHealth:
        """See `Teacher.health`."""
        return self._exchange.health()

    def info(self) -> TeacherInfo:
        """See `Teacher.info`; blocks until the server has loaded a model or the outage budget is spent."""
        self._info = self._send(DescriptionRequest(self._settings.teacher)).result()
        return self._info

    def submit(
        self, rollouts: Sequence[Rollout], signals: Sequence[Signal], *, mass: float = 0.0
    ) -> Future[list[TeacherScores]]:
        """See `Teacher.submit`; signals hidden and logits take one sequence at a time.

        Blocks only while `max_waiting` requests wait in the client.
        """
        if signals[0] in ("hidden", "logits"):
            return self._submit_rows(rollouts[0], signals[0])
        topk = "topk" in signals
        message = self._settings.for_rollouts(
            rollouts,
            "topk" if topk else "sampled",
            k=self._settings.k if topk else 0,
            mass=mass if topk else 0.0,
            with_sampled=topk and "sampled" in signals,
        )
        return self._send(ScoresRequest(message, self._vocab_size()))

    def _submit_rows(self, rollout: Rollout, signal: Signal) -> Future[list[TeacherScores]]:
        message = self._settings.for_rollouts([rollout], signal)
        n_columns, dtype = self._vocab_size(), np.float16 if self._settings.wire == "fp16" else np.float32
        if signal == "hidden":
            n_columns, dtype = (self._info or self.info()).hidden_size, np.float32
        shape = message.header.n_rows, n_columns
        return self._send(MatrixRequest(message, shape, self._exchange.acknowledge, partial(_scores, signal), dtype))

    def lm_head(self) -> np.ndarray:
        """See `Teacher.lm_head`."""
        info = self._info or self.info()
        message, shape = self._settings.for_head(), (info.vocab_size, info.hidden_size)
        return self._send(MatrixRequest(message, shape, self._exchange.acknowledge, np.asarray)).result()

    def _vocab_size(self) -> int:
        """Return the upper bound of token ids; asks the server once if `n_vocab` is 0."""
        return self._settings.n_vocab or (self._info or self.info()).vocab_size

    def _send(self, request: PendingRequest[T]) -> Future[T]:
        self._exchange.submit(request)
        return request.future


def _scores(signal: str, rows: np.ndarray) -> list[TeacherScores]:
    return [TeacherScores(hidden=rows) if signal == "hidden" else TeacherScores(logits=rows)]


def load_keys(folder: str) -> PeerKeys | None:
    """Load the keys in teacher.keys; None if it is empty (no encryption). Raises ConfigError."""
    if not folder:
        return None
    from teacher_server.wire.keys import KeysError, load_peer_keys

    try:
        return load_peer_keys(os.path.abspath(folder), "client")
    except KeysError as error:
        problem, _, fix = str(error).partition(" Fix: ")
        fix = fix or "give a client's bundle, made by `gkd teacher keygen`."
        raise ConfigError("teacher.keys", folder, problem, fix) from error
