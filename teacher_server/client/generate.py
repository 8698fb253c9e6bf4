"""A client's request for answers: its header and frame, and the check of the reply."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from teacher_server.client.requests import Request, RequestMessage, refusals_of
from teacher_server.wire.answers import unpack_answers
from teacher_server.wire.protocol import (
    ID_BYTES,
    MAX_TOKENS,
    Buffer,
    GenerateReply,
    GenerateRequest,
    ProtocolError,
    ServerMessage,
    as_frame,
    checksum,
    token_digest,
)


@dataclass(frozen=True, slots=True)
class NamedPrompt:
    """A prompt to answer."""

    name: str  # identifies it in errors, e.g. ``rows.jsonl:17``
    ids: np.ndarray  # [P] int32
    seed: int  # answer i has the seed + i


@dataclass(frozen=True, slots=True)
class AnswerSettings:
    """Settings that all requests for answers share. The fields of `GenerateRequest` have these names, too."""

    n: int
    temperature: float
    top_p: float
    max_tokens: int
    n_vocab: int
    stop_ids: Sequence[int]

    @property
    def most_prompts(self) -> int:
        """Return the most prompts of one request, whose answers fit a frame."""
        return MAX_TOKENS // (self.n * self.max_tokens)


class GenerateCall(Request):
    """Request `n` answers to each prompt: the ids of each answer, [R] int32, those of one prompt after the other.

    Args:
        teacher: its name; empty if the server has one teacher.
        resend_s: send again if no reply arrived for this long.
    """

    def __init__(
        self, prompts: Sequence[NamedPrompt], settings: AnswerSettings, *, teacher: str, resend_s: float
    ) -> None:
        names = [prompt.name for prompt in prompts]
        ids = np.ascontiguousarray(np.concatenate([prompt.ids for prompt in prompts]), "<i4")
        with refusals_of(names[0]):
            self._sent = GenerateRequest(
                request_id=os.urandom(ID_BYTES),
                teacher=teacher,
                lengths=[len(prompt.ids) for prompt in prompts],
                seeds=[prompt.seed for prompt in prompts],
                n=settings.n,
                temperature=settings.temperature,
                top_p=settings.top_p,
                max_tokens=settings.max_tokens,
                n_vocab=settings.n_vocab,
                stop_ids=list(settings.stop_ids),
                deadline_s=2 * resend_s,
                checksum=checksum(as_frame(ids)),
            )
        super().__init__(RequestMessage(self._sent, [as_frame(ids)], token_digest(ids), resend_s, what=names[0]))
        self.names = names
        self.n_sequences = len(prompts) * settings.n

    def accept(self, reply: ServerMessage, frames: list[Buffer], now_s: float) -> list[np.ndarray]:
        if not isinstance(reply, GenerateReply):
            raise ProtocolError(f"received {type(reply).__name__} for a request for answers")
        self._check_source(reply)
        return unpack_answers(self._sent, reply, frames)
