"""One request's life, from its first sending to the answer that its future gets.

A `Pending` knows what it asked and which answer is one to it. When to send it and how often is the
business of `exchange`, whose thread is the only one to use a `Pending` once it is submitted.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Generic, TypeVar

import msgspec
import numpy as np

from gkd.data.score_checks import MASS_SLACK, validate_topk
from gkd.errors import TeacherError
from gkd.teacher.base import TeacherInfo
from gkd.types import TeacherTopK
from teacher_server.wire.payload import unpack_sampled, unpack_topk
from teacher_server.wire.protocol import (
    ID_BYTES,
    Buffer,
    HeadRequest,
    InfoReply,
    InfoRequest,
    ProtocolError,
    RowsReply,
    ScoreReply,
    ScoreRequest,
    as_frame,
    requests,
    token_digest,
)

_INFO_RESEND_S = 1.0
T = TypeVar("T")
Answer = ScoreReply | RowsReply | InfoReply
Query = ScoreRequest | HeadRequest | InfoRequest


class Pending(Generic[T]):
    """A request under way.

    Args:
        where: names it in errors, e.g. ``prompt 17, sample 2``.
        query: its header; a stream may get another request id later.
        frames: what follows the header.
        resend_s: send it again when nothing came for this long.

    Raises:
        ProtocolError: the other side would refuse the header.
    """

    is_work = True  # takes a place in the window
    is_stream = False

    def __init__(self, where: str, query: Query, frames: Sequence[Buffer], *, resend_s: float) -> None:
        self.where, self.query, self.resend_s = where, query, resend_s
        self.future: Future[T] = Future()
        self.message: list[Buffer] = [requests.encode(query), *frames]
        self.due_s = 0.0  # send (again) at this time of the exchange's clock
        self.n_sent = 0
        self.n_damaged = 0

    @property
    def request_id(self) -> bytes:
        return self.query.request_id

    def take(self, answer: Answer, frames: list[Buffer], now_s: float) -> T | None:
        """The result, or None if more is to come.

        Raises:
            ProtocolError: damaged, or about something else: to be asked for again.
            TeacherError: it cannot be right, and would not be the next time.
        """
        raise NotImplementedError

    @property
    def paused(self) -> bool:
        """Whether our own side holds it up."""
        return False

    def is_lost(self, now_s: float) -> bool:
        """Whether to ask under a new id when its time is up, because a resend would change nothing."""
        return False

    def rename(self) -> None:
        """Become a request that the server cannot take for one it knows."""
        self.query = msgspec.structs.replace(self.query, request_id=os.urandom(ID_BYTES))
        self.message[0] = requests.encode(self.query)


def check_source(digest: bytes, answer: ScoreReply | RowsReply) -> None:
    """Raises ProtocolError if it is about other tokens or nobody signed it."""
    if answer.token_digest != digest:
        raise ProtocolError(f"the reply of worker {answer.worker!r} is about other tokens")
    if not answer.worker:
        raise ProtocolError("the reply names no worker")


class _Scores(Pending[T]):
    """What `topk` and `sampled` share: one message is the whole answer."""

    def __init__(self, where: str, request: ScoreRequest, tokens: np.ndarray, *, resend_s: float) -> None:
        super().__init__(where, request, [as_frame(tokens)], resend_s=resend_s)
        self.request, self._digest = request, token_digest(tokens)

    def _check(self, answer: Answer) -> ScoreReply:
        if not isinstance(answer, ScoreReply):
            raise ProtocolError(f"{type(answer).__name__} is no answer to {self.request.signal}")
        check_source(self._digest, answer)
        got = (answer.signal, answer.n_rows, answer.k, answer.wire, answer.adaptive)
        request = self.request
        wanted = (request.signal, request.n_response, request.k, request.wire, request.mass > 0)
        if got != wanted:
            raise ProtocolError(f"(signal, rows, k, wire, adaptive) are {got}, expected {wanted}")
        return answer


class TopK(_Scores[TeacherTopK]):
    """`n_vocab`: all ids are below it."""

    def __init__(self, where: str, request: ScoreRequest, tokens: np.ndarray, *, resend_s: float, n_vocab: int) -> None:
        super().__init__(where, request, tokens, resend_s=resend_s)
        self._n_vocab = n_vocab

    def take(self, answer: Answer, frames: list[Buffer], now_s: float) -> TeacherTopK:
        reply = self._check(answer)
        got = unpack_topk(reply, frames)
        scores = TeacherTopK(got.ids, got.logprobs, got.tail, got.counts)
        where = f"{self.where}, from worker {reply.worker!r}"
        validate_topk(scores, self._n_vocab, where, n_rows=self.request.n_response)
        if scores.counts is not None:
            self._check_target(scores, scores.counts, where)
        return scores

    def _check_target(self, scores: TeacherTopK, counts: np.ndarray, where: str) -> None:
        short = (counts < self.request.k) & (1 - scores.tail_mass < self.request.mass - MASS_SLACK)
        if short.any():
            row = int(short.argmax())
            raise TeacherError(
                f"{where}: response position {row}: {counts[row]} of {self.request.k} entries with a mass of "
                f"{1 - scores.tail_mass[row]:.6g} were sent for a target of {self.request.mass:g}"
            )


class Sampled(_Scores[np.ndarray]):
    def take(self, answer: Answer, frames: list[Buffer], now_s: float) -> np.ndarray:
        reply = self._check(answer)
        logprobs = unpack_sampled(reply, frames)
        if logprobs.max() > MASS_SLACK:
            raise TeacherError(
                f"{self.where}, from worker {reply.worker!r}: a logprob is {logprobs.max():.6g}, above 0"
            )
        return logprobs


class Info(Pending[TeacherInfo]):
    """`teacher`: its name; empty: the only one there."""

    is_work = False

    def __init__(self, teacher: str) -> None:
        query = InfoRequest(request_id=os.urandom(ID_BYTES), teacher=teacher)
        super().__init__("the teacher's description", query, [], resend_s=_INFO_RESEND_S)
        self._teacher = teacher

    def take(self, answer: Answer, frames: list[Buffer], now_s: float) -> TeacherInfo:
        if not isinstance(answer, InfoReply) or (self._teacher and answer.teacher != self._teacher):
            raise ProtocolError(f"not a description of teacher {self._teacher!r}")
        return TeacherInfo(
            teacher=answer.teacher,
            model_name=answer.model_name,
            model_path=answer.model_path,
            fingerprint=answer.model_fingerprint,
            vocab_size=answer.vocab_size,
            hidden_size=answer.hidden_size,
            tokenizer_fingerprint=answer.tokenizer_fingerprint,
            max_tokens=answer.max_tokens,
            n_workers=answer.n_workers,
            n_streams=answer.n_streams,
            engine=answer.engine,
            device=answer.device,
            dtype=answer.dtype,
            protocol_version=answer.protocol_version,
        )
