"""Requests and replies of the teacher server, made without a client or a worker."""

from __future__ import annotations

import os

import numpy as np

from teacher_server.wire.payload import pack_topk
from teacher_server.wire.protocol import ID_BYTES, ScoreReply, ScoreRequest, as_frame, checksum, replies
from teacher_server.wire.table import TopKTable


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


def make_topk_head(n_rows: int, k: int) -> ScoreReply:
    """As a worker fills it in; `checksums` are still missing."""
    return ScoreReply(
        request_id=bytes(ID_BYTES),
        token_digest=bytes(ID_BYTES),
        model_fingerprint="f",
        worker="w",
        signal="topk",
        n_rows=n_rows,
        k=k,
        n_entries=n_rows * k,
        wire="fp16",
        checksums=[],
        queue_s=0.1,
        compute_s=0.1,
    )


def pack(head: ScoreReply, scores: TopKTable) -> list[bytes | memoryview]:
    """Return [header, planes], with the checksums in the header: what a worker does after its engine."""
    frames = pack_topk(scores, head)
    head.checksums = [checksum(frame) for frame in frames]
    return [replies.encode(head), *frames]
