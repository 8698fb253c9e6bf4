"""The teacher behind a network address: keeps a window of sequences in flight until each is scored.

On the road of one batch: rollout -> *teacher score* -> micro-batches. Each sequence is one request
under a random id. It is sent again, under the same id, when its time is up, when the server is
busy, and when the server has restarted and so forgotten it; only the first valid reply is used.
Needs numpy and zmq, no torch.
"""

from __future__ import annotations

import os
import random
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from gkd.errors import ConfigError, TeacherError
from gkd.teacher.base import TeacherInfo, validate_topk
from gkd.teacher.link import TeacherLink
from gkd.types import Rollout, TeacherTopK
from teacher_server.protocol import (
    ID_BYTES,
    MAX_ID,
    MAX_K,
    Buffer,
    ErrorReply,
    InfoReply,
    InfoRequest,
    ProtocolError,
    ScoreRequest,
    ServerMessage,
    TopKReply,
    Wire,
    as_frame,
    check_tokens,
    checksum,
    requests,
    token_digest,
    unpack_topk,
)

_MAX_DAMAGED = 5  # damaged exchanges of one request before it is an error instead of bad luck


@dataclass(slots=True)
class ClientStats:
    """Counts since the client was made; for metrics and tests."""

    n_sent: int = 0  # requests put on the wire, resends included
    n_resent: int = 0
    n_busy: int = 0  # the server's queue was full
    n_damaged: int = 0  # exchanges either side could not read, or about other tokens
    n_unwanted: int = 0  # late and duplicate replies
    n_server_restarts: int = 0


@dataclass(slots=True)
class _Pending:
    """One sequence until its scores are in."""

    index: int
    where: str  # names it in errors
    request: ScoreRequest
    frames: list[Buffer]
    digest: bytes
    due_s: float = 0.0  # send (again) at this time of the link's clock
    n_sent: int = 0
    n_damaged: int = 0


class ZmqTeacher:
    """A `Teacher` at `server_ip:server_port`. One thread at a time may use it.

    Args:
        k: top-k entries a response position.
        temperature: the teacher's logits are divided by it.
        n_vocab: size of the common vocabulary; the teacher's rows are cut to it, then normalised. 0 = all.
        n_in_flight: window of unanswered requests.
        request_timeout_s: a request without an answer for this long is sent again.
        outage_budget_s: give up when nothing at all was heard for this long, or when the server lives
            but returned no scores for this long plus `request_timeout_s`.
        wire: "fp16" (5 bytes an entry) or "fp32" (8 bytes, exact).
        expected_fingerprint: of the teacher's weights; another teacher's scores raise TeacherError. Empty: the
            first one that answers is the expected one.

    Raises:
        ConfigError: a setting is out of range.
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
    ) -> None:
        _check_range("teacher.server_port", server_port, 1, 65535)
        _check_range("n_vocab", n_vocab, 0, MAX_ID + 1)
        _check_range("teacher.topk", k, 1, min(MAX_K, n_vocab or MAX_K))
        _check_range("teacher.temperature", temperature, 1e-4, 1e4)
        _check_range("n_in_flight", n_in_flight, 1, 1 << 20)
        _check_range("teacher.request_timeout_s", request_timeout_s, 1e-3, 4e4)
        _check_range("teacher.outage_budget_s", outage_budget_s, 1e-3, 1e6)
        self.stats = ClientStats()
        self._k, self._temperature, self._n_vocab, self._wire = k, temperature, n_vocab, wire
        self._n_in_flight, self._request_timeout_s = n_in_flight, request_timeout_s
        self._pending: dict[bytes, _Pending] = {}
        self._fingerprint = expected_fingerprint
        self._vocab_size = 0
        stall_budget_s = outage_budget_s + request_timeout_s
        self._link = TeacherLink(server_ip, server_port, outage_budget_s=outage_budget_s, stall_budget_s=stall_budget_s)

    def close(self) -> None:
        """Drop what is in flight and close, without waiting for the server; may be called twice."""
        self._pending.clear()
        self._link.close()

    def info(self) -> TeacherInfo:
        """See `Teacher.info`. Blocks until a model has loaded there or the outage budget is spent."""
        self._link.begin()
        try:
            request = InfoRequest(request_id=os.urandom(ID_BYTES))
            frame, due_s = requests.encode(request), 0.0
            while True:
                if self._link.now_s() >= due_s and self._link.send([frame]):
                    due_s = self._link.now_s() + 1.0
                for header, _ in self._link.receive("its description is"):
                    if isinstance(header, InfoReply) and header.request_id == request.request_id:
                        self._check_model(header.model_fingerprint)
                        self._vocab_size = header.vocab_size
                        return _teacher_info(header)
                    if isinstance(header, ErrorReply):
                        self._link.trouble = f"{header.code}: {header.text}"
        finally:
            self._link.end()

    def score(self, rollouts: Sequence[Rollout]) -> Iterator[tuple[int, TeacherTopK]]:
        """See `Teacher.score`. Leaving the iterator early drops what is in flight."""
        if self._n_vocab == 0 and self._vocab_size == 0:
            self.info()
        self._link.begin()
        try:
            todo = deque(enumerate(rollouts))
            while todo or self._pending:
                while todo and len(self._pending) < self._n_in_flight:
                    pending = self._make(*todo.popleft())
                    self._pending[pending.request.request_id] = pending
                self._send_due()
                arrivals = self._link.receive(f"{len(self._pending) + len(todo)} sequences are")
                self._note_restart()
                for header, frames in arrivals:
                    scored = self._take(header, frames)
                    if scored is not None:
                        given_s = time.monotonic()
                        yield scored
                        self._link.pause_since(given_s)
        finally:
            self._pending.clear()
            self._link.end()

    # Requests

    def _make(self, index: int, rollout: Rollout) -> _Pending:
        where = f"prompt {rollout.prompt_id}, sample {rollout.sample_index}"
        try:
            tokens = check_tokens(np.concatenate([rollout.prompt_ids, rollout.response_ids]))
            request = ScoreRequest(
                request_id=os.urandom(ID_BYTES),
                signal="topk",
                k=self._k,
                temperature=self._temperature,
                n_vocab=self._n_vocab,
                prompt_length=len(rollout.prompt_ids),
                total_length=len(tokens),
                wire=self._wire,
                deadline_s=2 * self._request_timeout_s,  # longer than until the resend, which renews it
                checksum=checksum(as_frame(tokens)),
            )
            frames: list[Buffer] = [requests.encode(request), as_frame(tokens)]
        except (ProtocolError, ValueError) as error:
            raise TeacherError(f"{where}: cannot be scored: {error}") from error
        return _Pending(index, where, request, frames, token_digest(tokens))

    def _send_due(self) -> None:
        now_s = self._link.now_s()
        for pending in self._pending.values():
            if pending.due_s <= now_s:
                if not self._link.send(pending.frames):
                    return
                self.stats.n_sent += 1
                self.stats.n_resent += pending.n_sent > 0
                pending.n_sent += 1
                pending.due_s = now_s + self._request_timeout_s

    def _note_restart(self) -> None:
        if self._link.n_server_restarts != self.stats.n_server_restarts:
            self.stats.n_server_restarts = self._link.n_server_restarts
            for pending in self._pending.values():
                pending.due_s = 0.0  # the new server knows none of them

    # Replies

    def _take(self, header: ServerMessage, frames: list[Buffer]) -> tuple[int, TeacherTopK] | None:
        """A finished sequence, or None: not wanted (any more), or to be asked for again."""
        if isinstance(header, ErrorReply):
            self._link.trouble = f"{header.code}: {header.text}"
        if not isinstance(header, TopKReply | ErrorReply) or header.request_id not in self._pending:
            self.stats.n_unwanted += 1
            return None
        pending = self._pending[header.request_id]
        if isinstance(header, ErrorReply):
            self._retry_or_raise(pending, header)
            return None
        self._check_model(header.model_fingerprint)
        try:
            if header.token_digest != pending.digest or header.k != self._k:
                raise ProtocolError("the reply is about other tokens or another k")
            scores = TeacherTopK(*unpack_topk(header, frames))
        except ProtocolError as error:
            self._damaged(pending, str(error))
            return None
        validate_topk(scores, self._n_vocab or self._vocab_size, pending.where, n_rows=pending.request.n_response)
        del self._pending[header.request_id]
        self._link.progressed()
        return pending.index, scores

    def _retry_or_raise(self, pending: _Pending, error: ErrorReply) -> None:
        if error.code == "busy":
            self.stats.n_busy += 1
            # Spread out, or the clients it turned away come back together.
            pending.due_s = self._link.now_s() + error.retry_after_s * random.uniform(0.5, 1.5)
        elif error.code == "deadline":
            pending.due_s = self._link.now_s()
        elif error.code == "damaged":
            self._damaged(pending, error.text)
        else:
            raise TeacherError(f"{pending.where}: teacher {self._link.address} refused it: {error.code}: {error.text}")

    def _damaged(self, pending: _Pending, problem: str) -> None:
        self.stats.n_damaged += 1
        pending.n_damaged += 1
        pending.due_s = self._link.now_s()
        if pending.n_damaged > _MAX_DAMAGED:
            raise TeacherError(f"{pending.where}: damaged {pending.n_damaged} times on the way: {problem}")

    def _check_model(self, fingerprint: str) -> None:
        if self._fingerprint and fingerprint != self._fingerprint:
            was, now = self._fingerprint, fingerprint
            raise TeacherError(f"teacher {self._link.address} now serves {now}, before it was {was}")
        self._fingerprint = fingerprint


def _check_range(key: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:  # also true for NaN
        raise ConfigError(key, value, f"it is not within {low:g} to {high:g}.", "choose a value in this range.")


def _teacher_info(reply: InfoReply) -> TeacherInfo:
    return TeacherInfo(
        model_name=reply.model_name,
        model_path=reply.model_path,
        fingerprint=reply.model_fingerprint,
        vocab_size=reply.vocab_size,
        tokenizer_fingerprint=reply.tokenizer_fingerprint,
        max_tokens=reply.max_tokens,
        n_workers=reply.n_workers,
        engine=reply.engine,
        device=reply.device,
        protocol_version=reply.protocol_version,
    )
