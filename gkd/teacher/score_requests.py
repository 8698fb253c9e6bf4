"""Requests of the teacher client whose reply is one message: top-k scores, logprobs of the response tokens, or both."""

from __future__ import annotations

import numpy as np

from gkd.data.score_checks import MASS_SLACK, validate_topk
from gkd.errors import TeacherError
from gkd.teacher.requests import PendingRequest, Reply, RequestMessage, T
from gkd.types import TeacherScores, TeacherTopK
from teacher_server.wire.given_ids import listed_problem
from teacher_server.wire.payload import unpack_sampled, unpack_topk
from teacher_server.wire.protocol import Buffer, ProtocolError, ScoreReply, ScoreRequest


class _ScoreRequest(PendingRequest[T]):
    """Base of requests whose reply is one message."""

    def __init__(self, message: RequestMessage[ScoreRequest]) -> None:
        super().__init__(message)
        self._sent, self._given = message.header, message.given

    def _check(self, reply: Reply) -> ScoreReply:
        sent = self._sent
        if not isinstance(reply, ScoreReply):
            raise ProtocolError(f"received {type(reply).__name__} for a {sent.signal} request")
        self._check_source(reply)
        received = (reply.signal, reply.n_rows, reply.k, reply.wire, reply.adaptive, reply.with_sampled)
        expected = (sent.signal, sent.n_response, sent.k, sent.wire, sent.mass > 0, sent.with_sampled)
        if received != expected:
            raise ProtocolError(f"(signal, rows, k, wire, adaptive, with_sampled) are {received}, expected {expected}")
        return reply


class _TableRequest(_ScoreRequest[T]):
    """Base of requests for top-k scores.

    Args:
        n_vocab: upper bound (exclusive) of the token ids in the reply.
    """

    def __init__(self, message: RequestMessage[ScoreRequest], n_vocab: int) -> None:
        super().__init__(message)
        self._n_vocab = n_vocab

    def _unpack(self, reply: Reply, frames: list[Buffer]) -> tuple[TeacherTopK, np.ndarray | None]:
        """Return the checked table, and the logprobs of the response tokens if they were requested."""
        checked = self._check(reply)
        unpacked = unpack_topk(checked, frames)
        scores = TeacherTopK(unpacked.ids, unpacked.logprobs, unpacked.tail, unpacked.counts)
        where = f"{self.name}, from worker {checked.worker!r}"
        validate_topk(scores, self._n_vocab, where, n_rows=self._sent.n_response)
        if scores.counts is not None:
            self._check_mass(scores, scores.counts, where)
        if self._given is not None and (problem := listed_problem(self._given, scores.topk_ids)):
            raise TeacherError(f"{where}: {problem}")
        if unpacked.sampled is not None:
            _check_sampled(unpacked.sampled, where)
        return scores, unpacked.sampled

    def _check_mass(self, scores: TeacherTopK, counts: np.ndarray, where: str) -> None:
        """Raise TeacherError if a row lists fewer than k entries without reaching the mass target."""
        sent = self._sent
        short = (counts < sent.k) & (1 - scores.tail_mass < sent.mass - MASS_SLACK)
        if short.any():
            row = int(short.argmax())
            raise TeacherError(
                f"{where}: response position {row}: {counts[row]} of {sent.k} entries have a mass of "
                f"{1 - scores.tail_mass[row]:.6g}, below the target of {sent.mass:g}"
            )


class TopKRequest(_TableRequest[TeacherTopK]):
    """Request top-k scores."""

    def accept(self, reply: Reply, frames: list[Buffer], now_s: float) -> TeacherTopK:
        return self._unpack(reply, frames)[0]


class MixedRequest(_TableRequest[TeacherScores]):
    """Request top-k scores and the logprob of each response token, from one forward pass."""

    def accept(self, reply: Reply, frames: list[Buffer], now_s: float) -> TeacherScores:
        table, sampled = self._unpack(reply, frames)
        return TeacherScores(topk=table, sampled_logprobs=sampled)


class SampledRequest(_ScoreRequest[np.ndarray]):
    """Request the logprob of each response token."""

    def accept(self, reply: Reply, frames: list[Buffer], now_s: float) -> np.ndarray:
        checked = self._check(reply)
        logprobs = unpack_sampled(checked, frames)
        _check_sampled(logprobs, f"{self.name}, from worker {checked.worker!r}")
        return logprobs


def _check_sampled(logprobs: np.ndarray, where: str) -> None:
    if logprobs.max() > MASS_SLACK:
        raise TeacherError(f"{where}: a logprob is {logprobs.max():.6g}, above 0")
