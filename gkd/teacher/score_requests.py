"""Request of the teacher client whose reply is one message: top-k scores, logprobs of the response tokens, or both."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from gkd.data.score_checks import MASS_SLACK, validate_topk
from gkd.errors import TeacherError
from gkd.teacher.requests import PendingRequest, Reply, RequestMessage
from gkd.types import TeacherScores, TeacherTopK
from teacher_server.wire.given_ids import listed_problem
from teacher_server.wire.payload import unpack_sampled, unpack_topk
from teacher_server.wire.protocol import Buffer, ProtocolError, ScoreReply, ScoreRequest


class ScoresRequest(PendingRequest[list[TeacherScores]]):
    """Request the scores of one or several sequences.

    Args:
        n_vocab: upper bound (exclusive) of the token ids in the reply.
    """

    def __init__(self, message: RequestMessage[ScoreRequest], n_vocab: int) -> None:
        super().__init__(message)
        self.n_sequences = len(message.names)
        self._sent, self._given, self._n_vocab = message.header, message.given, n_vocab

    def accept(self, reply: Reply, frames: list[Buffer], now_s: float) -> list[TeacherScores]:
        checked = self._check(reply)
        if checked.signal == "topk":
            unpacked = unpack_topk(checked, frames)
            table = TeacherTopK(unpacked.ids, unpacked.logprobs, unpacked.tail, unpacked.counts)
            joined = TeacherScores(table, unpacked.sampled)
        else:
            joined = TeacherScores(sampled_logprobs=unpack_sampled(checked, frames))
        n_rows, worker = self._sent.n_response, f"from worker {checked.worker!r}"
        try:
            self._validate(joined, self._given, n_rows, f"{self.name}, {worker}")
        except TeacherError:
            for name, rows in zip(self.names, self._rows(), strict=True):  # which sequence is it?
                given = None if self._given is None else self._given[rows]
                self._validate(_part(joined, rows), given, rows.stop - rows.start, f"{name}, {worker}")
            raise
        return [joined] if len(self.names) == 1 else [_part(joined, rows) for rows in self._rows()]

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

    def _rows(self) -> Iterator[slice]:
        """Yield the rows of each sequence."""
        start = 0
        for n_prompt, n_total in self._sent.sequences:
            yield slice(start, start := start + n_total - n_prompt)

    def _validate(self, scores: TeacherScores, given: np.ndarray | None, n_rows: int, where: str) -> None:
        """Check the scores of one or of all sequences. Raises TeacherError."""
        table = scores.topk
        if table is not None:
            validate_topk(table, self._n_vocab, where, n_rows=n_rows)
            if table.counts is not None:
                self._check_mass(table, table.counts, where)
            if given is not None and (problem := listed_problem(given, table.topk_ids)):
                raise TeacherError(f"{where}: {problem}")
        sampled = scores.sampled_logprobs
        if sampled is not None and sampled.max() > MASS_SLACK:
            raise TeacherError(f"{where}: a logprob is {sampled.max():.6g}, above 0")

    def _check_mass(self, table: TeacherTopK, counts: np.ndarray, where: str) -> None:
        """Raise TeacherError if a row lists fewer than k entries without reaching the mass target."""
        sent = self._sent
        short = (counts < sent.k) & (1 - table.tail_mass < sent.mass - MASS_SLACK)
        if short.any():
            row = int(short.argmax())
            raise TeacherError(
                f"{where}: response position {row}: {counts[row]} of {sent.k} entries have a mass of "
                f"{1 - table.tail_mass[row]:.6g}, below the target of {sent.mass:g}"
            )


def _part(scores: TeacherScores, rows: slice) -> TeacherScores:
    """Return some rows of the tables, as views."""
    table, sampled = scores.topk, scores.sampled_logprobs
    part = None
    if table is not None:
        counts = None if table.counts is None else table.counts[rows]
        part = TeacherTopK(table.topk_ids[rows], table.topk_logprobs[rows], table.tail_mass[rows], counts)
    return TeacherScores(part, None if sampled is None else sampled[rows])
