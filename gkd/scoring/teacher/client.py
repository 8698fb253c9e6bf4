"""Client of the teacher server, a `gkd.scoring.teacher.teacher.Teacher`.

    ZmqTeacher -> requests         build a request; check the replies
               -> exchange         one thread: window of requests in flight, resends
               -> link, outage     connection and heartbeats; when to give up

Thread-safe. Imports numpy and zmq, but not torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from gkd.config.check_values import check_value
from gkd.config.schema_teacher import MAX_NAME_LENGTH
from gkd.errors import ConfigError, TeacherError
from gkd.scoring.teacher.exchange import ClientStats, Exchange, OnScored
from gkd.scoring.teacher.info import TeacherInfo
from gkd.scoring.teacher.link import TeacherLink
from gkd.scoring.teacher.outage import OutageClock
from gkd.scoring.teacher.requests import (
    DescriptionRequest,
    MatrixRequest,
    PendingRequest,
    RequestMessage,
    RequestSettings,
    ScoresRequest,
    T,
    together,
)
from gkd.types import Rollout, TeacherHealth, TeacherScores
from teacher_server.wire.protocol import MAX_ID, ScoreRequest, Signal, Wire

if TYPE_CHECKING:
    from teacher_server.wire.keys import PeerKeys

MAX_WAITING = 4096


class ZmqTeacher:
    """A teacher at `server_ip:server_port`. Thread-safe.

    Methods and futures raise TeacherUnavailable if the server sent no reply, or no scores, within the budgets; the
    client remains usable. They raise another TeacherError if a request was refused, scores are invalid, or the client
    is closed.

    Args:
        k: top-k entries per response position.
        temperature: divisor of the teacher's logits.
        n_vocab: size of the common vocabulary. The teacher's rows are truncated to it and then normalized. 0 = all.
        n_in_flight: maximum number of requests at the server; others wait in the client.
        request_timeout_s: resend a request without a reply after this time.
        outage_budget_s: give up if no message at all arrived for this long, or if the server is alive but returned no
            scores for this long plus `request_timeout_s`.
        wire: "fp16" (5 bytes per entry) or "fp32" (8 bytes, exact).
        expected_fingerprint: of the teacher's weights; scores of other weights raise TeacherError. Empty expects
            the weights of the first reply.
        name: one of the server's teachers; may be empty if there is only one.
        keys: folder with server.key and client.key_secret; empty disables encryption.
        max_waiting: requests waiting in the client before a further one blocks.
        on_scored: as in `Exchange`.

    Raises:
        ConfigError: a setting is out of range, or the keys are invalid.
    """

    def __init__(
        self,
        server_ip: str,
        server_port: int,
        *,
        k: int,
        temperature: float,
        n_vocab: int,
        n_in_flight: int,
        request_timeout_s: float,
        outage_budget_s: float,
        wire: Wire = "fp16",
        expected_fingerprint: str = "",
        name: str = "",
        keys: str = "",
        max_waiting: int = MAX_WAITING,
        on_scored: OnScored | None = None,
    ) -> None:
        check_value("teacher.server_port", server_port)
        check_value("teacher.topk", k)
        check_value("teacher.temperature", temperature)
        check_value("teacher.request_timeout_s", request_timeout_s)
        check_value("teacher.outage_budget_s", outage_budget_s)
        _check_range("n_vocab", n_vocab, 0, MAX_ID + 1)
        _check_range("teacher.topk", k, 1, n_vocab or k)
        _check_range("n_in_flight", n_in_flight, 1, 1 << 20)
        _check_range("max_waiting", max_waiting, 1, 1 << 20)
        if len(name) > MAX_NAME_LENGTH:
            problem = f"longer than {MAX_NAME_LENGTH} characters."
            raise ConfigError("teacher.name", name, problem, "use one of the server's names.")
        self._settings = RequestSettings(name, k, temperature, n_vocab, wire, request_timeout_s)
        self._info: TeacherInfo | None = None
        clock = OutageClock(outage_budget_s=outage_budget_s, stall_budget_s=outage_budget_s + request_timeout_s)
        link = TeacherLink(server_ip, server_port, clock, load_keys(keys))
        self._exchange = Exchange(
            link,
            n_in_flight=n_in_flight,
            max_waiting=max_waiting,
            fingerprint=expected_fingerprint,
            on_scored=on_scored,
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
        info: TeacherInfo = self._send(DescriptionRequest(self._settings.teacher)).result()
        if info.protocol_version >= 4:  # an older server refuses the question
            info = self._send(DescriptionRequest(self._settings.teacher, with_template=True)).result()
        self._info = info
        return info

    def submit(
        self, rollouts: Sequence[Rollout], signals: Sequence[Signal], *, mass: float = 0.0
    ) -> Future[list[TeacherScores]]:
        """See `Teacher.submit`. A server of version 2 takes one sequence; signals hidden and logits take one at a time.
        Rollouts with `own` need a server of version 4.

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
        self._check_version(message)
        return self._send(ScoresRequest(message, self._vocab_size()))

    def _submit_rows(self, rollout: Rollout, signal: Signal) -> Future[list[TeacherScores]]:
        message = self._settings.for_rollouts([rollout], signal)
        self._check_version(message)
        n_columns, dtype = self._vocab_size(), np.float16 if self._settings.wire == "fp16" else np.float32
        if signal == "hidden":
            n_columns, dtype = (self._info or self.info()).hidden_size, np.float32
        shape = message.header.n_rows, n_columns
        return self._send(MatrixRequest(message, shape, self._exchange.acknowledge, partial(_scores, signal), dtype))

    def _check_version(self, message: RequestMessage[ScoreRequest]) -> None:
        """Raise TeacherError if rows of own tokens only are requested of a server that refuses them."""
        if message.header.n_own and (version := (self._info or self.info()).protocol_version) < 4:
            problem = (
                f"it has tokens that are not the student's own, and the teacher server has protocol version {version}"
            )
            fix = "upgrade the teacher server: version 4 returns rows of own tokens only"
            raise TeacherError(f"{together(message.names)}: cannot be scored: {problem}. Fix: {fix}")

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
        return load_peer_keys(folder, "client")
    except KeysError as error:
        fix = "give a client's bundle, made by `python -m teacher_server keygen`."
        raise ConfigError("teacher.keys", folder, str(error), fix) from error


def _check_range(key: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:  # NaN is refused, too
        raise ConfigError(key, value, f"not in [{low:g}, {high:g}].", "choose a value in this range.")
