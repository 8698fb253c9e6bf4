"""Make valid messages for tests. Any field can be overridden."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import numpy as np

from teacher_server.wire.payload import pack_topk
from teacher_server.wire.protocol import ID_BYTES, RowsReply, ScoreReply, ScoreRequest, as_frame, checksum, token_digest
from teacher_server.wire.status import ServerStatus
from teacher_server.wire.table import TopKTable
from teacher_server.wire.worker_protocol import WorkerHello

V, H = 50, 8  # of the model that `make_hello` announces


def make_hello(**changes: Any) -> WorkerHello:
    fields: dict[str, Any] = {
        "name": "w",
        "teacher": "",
        "host": "here",
        "pid": 1,
        "model_name": "m",
        "model_path": "/m",
        "model_fingerprint": "f",
        "tokenizer_fingerprint": "t",
        "vocab_size": V,
        "hidden_size": H,
        "max_tokens": 1000,
        "engine": "trivial",
        "device": "cpu",
        "dtype": "float32",
        "gpus": [],
        "credit_tokens": 100,
        "n_streams": 4,
    }
    return WorkerHello(**(fields | changes))


def make_status() -> ServerStatus:
    return ServerStatus(
        epoch="e",
        uptime_s=1.0,
        draining=False,
        n_queued=1,
        queued_bytes=2,
        n_answered=3,
        n_errors={"busy": 4},
        n_retried=5,
        n_lost_workers=6,
        excluded={"w1": "NaN"},
        teachers=[],
        workers=[],
    )


def make_tokens(n: int = 40, seed: int = 0) -> np.ndarray:
    """Return [n] int32 random token ids."""
    return np.random.default_rng(seed).integers(0, V, n).astype(np.int32)


def make_request(tokens: np.ndarray | None = None, **changes: Any) -> ScoreRequest:
    tokens = make_tokens() if tokens is None else tokens
    fields: dict[str, Any] = {
        "request_id": os.urandom(ID_BYTES),
        "signal": "topk",
        "k": 4,
        "prompt_length": 10 if len(tokens) > 10 else 1,
        "total_length": len(tokens),
        "wire": "fp16",
        "deadline_s": 10.0,
        "checksum": checksum(as_frame(tokens)),
    }
    fields |= changes
    if fields["signal"] != "topk" and "k" not in changes:
        fields["k"] = 0
    return ScoreRequest(**fields)


def make_scores(n_rows: int, k: int, *, max_id: int = V - 1, mass: bool = False, seed: int = 0) -> TopKTable:
    """Return random scores whose rows are distributions: distinct ids, descending, listed mass + tail = 1."""
    rng = np.random.default_rng(seed)
    # Ids of a row are distinct: a random start, then equal steps that stay below the largest id.
    step = max(1, (max_id + 1) // k)
    ids = (rng.integers(0, step, (n_rows, 1)) + np.arange(k) * step).astype(np.int32)
    logits = -np.sort(rng.exponential(4.0, (n_rows, k + 1)), axis=1)
    logprobs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    counts = rng.integers(1, k + 1, n_rows).astype(np.int32) if mass else None
    listed, kept = logprobs[:, :k].astype(np.float32), np.ones((n_rows, k), bool)
    if counts is not None:
        kept = np.arange(k) < counts[:, None]
        ids[~kept], listed[~kept] = -1, -np.inf
    tail = 1 - np.exp(listed.astype(np.float64)).sum(1)
    return TopKTable(ids, listed, np.maximum(tail, 0).astype(np.float32), counts)


def make_reply(
    request: ScoreRequest, tokens: np.ndarray, scores: TopKTable | None = None, **changes: Any
) -> tuple[ScoreReply, list[memoryview]]:
    """Return (header, frames) of a valid reply to a `topk` request from the worker of `make_hello`."""
    if scores is None:
        scores = make_scores(request.n_rows, request.k, mass=request.mass > 0)
        if request.with_sampled:
            scores = replace(scores, sampled=-np.arange(request.n_rows, dtype=np.float32))
    fields: dict[str, Any] = {
        "request_id": request.request_id,
        "token_digest": token_digest(tokens),
        "model_fingerprint": "f",
        "worker": "w",
        "signal": "topk",
        "n_rows": len(scores.ids),
        "k": request.k,
        "n_entries": scores.ids.size if scores.counts is None else int(scores.counts.sum()),
        "adaptive": scores.counts is not None,
        "wire": request.wire,
        "checksums": [],
        "queue_s": 0.25,
        "compute_s": 1.5,
        "with_sampled": scores.sampled is not None,
    }
    reply = ScoreReply(**fields)
    frames = pack_topk(scores, reply)
    reply.checksums = [checksum(frame) for frame in frames]
    for name, value in changes.items():  # not `replace`, which checks them
        setattr(reply, name, value)
    return reply, frames


def rows_message(
    request: Any, digest: bytes, rows: np.ndarray, start: int, stop: int, stream_id: bytes, index: int, **changes: Any
) -> tuple[RowsReply, list[memoryview]]:
    """Return (header, frames) with the rows from `start` to `stop` of a matrix, the reply to a request."""
    frame = as_frame(np.ascontiguousarray(rows[start:stop]))
    signal = getattr(request, "signal", "head").replace("topk", "logits")
    fields = {"request_id": request.request_id, "token_digest": digest, "model_fingerprint": "f", "worker": "w"}
    fields |= {"stream_id": stream_id, "signal": signal, "index": index, "start": start, "stop": stop}
    fields |= {"n_rows": len(rows), "n_cols": rows.shape[1], "dtype": "float32", "checksums": [checksum(frame)]}
    fields |= {"queue_s": 0.0, "compute_s": 0.0}
    return RowsReply(**(fields | changes)), [frame]
