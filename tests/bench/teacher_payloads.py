"""Make the payload of the transport benchmark: top-64 logprobs of 64 sequences of 1024 response tokens."""

from __future__ import annotations

import os
from typing import NamedTuple

import numpy as np

from teacher_server.wire.payload import TopKScores, pack_topk
from teacher_server.wire.protocol import (
    ID_BYTES,
    ScoreReply,
    ScoreRequest,
    Wire,
    as_frame,
    checksum,
    replies,
    token_digest,
)
from tests.service.messages import make_scores

N_SEQUENCES, N_ROWS, K, VOCAB = 64, 1024, 64, 151_936
N_PROMPT = 32
N_ENTRIES = N_ROWS * K  # of a sequence
WINDOW = 64  # maximum number of messages in flight, in every lane that pipelines


class Packed(NamedTuple):
    """One sequence's answer as it travels."""

    head: ScoreReply
    frames: list[memoryview]

    @property
    def n_bytes(self) -> int:
        """Size of all frames, including the header."""
        return len(replies.encode(self.head)) + sum(frame.nbytes for frame in self.frames)


def make_all_scores() -> list[TopKScores]:
    """The same in every process."""
    return [make_scores(N_ROWS, K, max_id=VOCAB - 1, seed=seed) for seed in range(N_SEQUENCES)]


def make_tokens(index: int) -> np.ndarray:
    """[N_PROMPT + N_ROWS] int32"""
    return np.random.default_rng(index).integers(0, VOCAB, N_PROMPT + N_ROWS).astype(np.int32)


def make_topk_request(tokens: np.ndarray, n_prompt: int, k: int, *, n_vocab: int = 0) -> ScoreRequest:
    """A request under a random id, as a client makes it."""
    return ScoreRequest(
        request_id=os.urandom(ID_BYTES),
        signal="topk",
        k=k,
        n_vocab=n_vocab,
        prompt_length=n_prompt,
        total_length=len(tokens),
        wire="fp16",
        deadline_s=120.0,
        checksum=checksum(as_frame(tokens)),
    )


def make_topk_head(n_rows: int, k: int, *, wire: Wire = "fp16", digest: bytes = bytes(ID_BYTES)) -> ScoreReply:
    """As a worker fills it in; `checksums` are still missing."""
    return ScoreReply(
        request_id=bytes(ID_BYTES),
        token_digest=digest,
        model_fingerprint="f",
        worker="w",
        signal="topk",
        n_rows=n_rows,
        k=k,
        n_entries=n_rows * k,
        wire=wire,
        checksums=[],
        queue_s=0.1,
        compute_s=0.1,
    )


def pack(head: ScoreReply, scores: TopKScores) -> Packed:
    """Scores -> frames, with their checksums in the header: what a worker does after its engine."""
    frames = pack_topk(scores, head)
    head.checksums = [checksum(frame) for frame in frames]
    return Packed(head, frames)


def make_all_packed() -> list[Packed]:
    return [pack(make_head(index), scores) for index, scores in enumerate(make_all_scores())]


def make_head(index: int) -> ScoreReply:
    """Return the header of the reply to `make_tokens(index)`."""
    return make_topk_head(N_ROWS, K, digest=token_digest(make_tokens(index)))
