"""Rollouts -> requests: what each signal asks for, and which answer the client then expects."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from gkd.errors import TeacherError
from gkd.teacher.base import TeacherInfo
from gkd.teacher.pending import Sampled, TopK
from gkd.teacher.streams import PiecewiseRows, Shape, WholeRows
from gkd.types import Rollout
from teacher_server.wire.payload import check_tokens
from teacher_server.wire.protocol import (
    ID_BYTES,
    HeadRequest,
    ProtocolError,
    Received,
    ScoreRequest,
    Signal,
    Wire,
    as_frame,
    checksum,
    token_digest,
)


@dataclass(frozen=True, slots=True)
class Queries:
    """Makes the requests of one client, from the settings that they share; see `ZmqTeacher` for these."""

    teacher: str
    k: int
    temperature: float
    n_vocab: int
    wire: Wire
    resend_s: float

    def topk(self, rollout: Rollout, vocab_size: int, k: int = 0, mass: float = 0.0) -> TopK:
        """Raises TeacherError, as all of them do, if the rollout or the settings cannot be asked about."""
        with _refused(where := _where(rollout)):
            tokens = _tokens(rollout)
            request = self._request(rollout, tokens, "topk", k=k or self.k, mass=mass)
            return TopK(where, request, tokens, resend_s=self.resend_s, n_vocab=self.n_vocab or vocab_size)

    def sampled(self, rollout: Rollout) -> Sampled:
        with _refused(where := _where(rollout)):
            tokens = _tokens(rollout)
            return Sampled(where, self._request(rollout, tokens, "sampled"), tokens, resend_s=self.resend_s)

    def hidden(self, rollout: Rollout, hidden_size: int, acknowledge: Callable[[Received], None]) -> WholeRows:
        with _refused(where := _where(rollout)):
            tokens = _tokens(rollout)
            request = self._request(rollout, tokens, "hidden")
            shape = Shape("hidden", request.n_response, hidden_size, token_digest(tokens))
            return WholeRows(where, request, [as_frame(tokens)], shape, acknowledge, resend_s=self.resend_s)

    def logits(self, rollout: Rollout, vocab_size: int, acknowledge: Callable[[Received], None]) -> PiecewiseRows:
        with _refused(where := _where(rollout)):
            tokens = _tokens(rollout)
            request = self._request(rollout, tokens, "logits")
            shape = Shape("logits", request.n_response, self.n_vocab or vocab_size, token_digest(tokens))
            return PiecewiseRows(where, request, [as_frame(tokens)], shape, acknowledge, resend_s=self.resend_s)

    def head(self, info: TeacherInfo, acknowledge: Callable[[Received], None]) -> WholeRows:
        where = "the LM head"
        with _refused(where):
            request = HeadRequest(
                request_id=os.urandom(ID_BYTES), teacher=self.teacher, wire=self.wire, deadline_s=self._deadline_s
            )
            shape = Shape("head", info.vocab_size, info.hidden_size, bytes(ID_BYTES))
            return WholeRows(where, request, [], shape, acknowledge, resend_s=self.resend_s)

    @property
    def _deadline_s(self) -> float:
        return 2 * self.resend_s  # longer than until the resend, which renews it

    def _request(
        self, rollout: Rollout, tokens: np.ndarray, signal: Signal, *, k: int = 0, mass: float = 0.0
    ) -> ScoreRequest:
        return ScoreRequest(
            request_id=os.urandom(ID_BYTES),
            signal=signal,
            teacher=self.teacher,
            k=k,
            mass=mass,
            temperature=self.temperature,
            n_vocab=self.n_vocab,
            prompt_length=len(rollout.prompt_ids),
            total_length=len(tokens),
            wire=self.wire,
            deadline_s=self._deadline_s,
            checksum=checksum(as_frame(tokens)),
        )


def _where(rollout: Rollout) -> str:
    return f"prompt {rollout.prompt_id}, sample {rollout.sample_index}"


def _tokens(rollout: Rollout) -> np.ndarray:
    return check_tokens(np.concatenate([rollout.prompt_ids, rollout.response_ids]))


@contextmanager
def _refused(where: str) -> Iterator[None]:
    try:
        yield
    except (ProtocolError, ValueError) as error:
        raise TeacherError(f"{where}: cannot be scored: {error}") from error
