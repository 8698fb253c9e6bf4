"""Check every reply of a worker against its request, before the broker forwards it to a client.

A worker whose reply fails a check is excluded, and other workers repeat its requests. A faulty GPU, a wrong
build or a damaged network buffer therefore costs time, but never gives wrong numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

from teacher_server.broker.job import Job
from teacher_server.wire.payload import check_reply, check_scores
from teacher_server.wire.protocol import (
    Buffer,
    ErrorReply,
    HeadRequest,
    ProtocolError,
    RowsReply,
    ScoreReply,
    ScoreRequest,
    ServerMessage,
)
from teacher_server.wire.worker_protocol import WorkerHello

_WORKER_ERRORS = ("engine", "bad_request", "damaged", "deadline")


def check_worker_reply(
    job: Job, hello: WorkerHello, reply: ServerMessage, frames: Sequence[Buffer], *, final: bool
) -> ScoreReply | RowsReply | ErrorReply:
    """Return `reply` if it is a valid reply of worker `hello` to `job`. Updates the job's position in its stream.

    Args:
        frames: all frames after the header.
        final: whether the message ends the job.

    Raises:
        ProtocolError: if the reply is for another request, other tokens or another model, if a row is missing or
            repeated, or if the data is damaged, not finite or not a probability.
    """
    if isinstance(reply, ErrorReply):
        _same("request_id", reply.request_id, job.request.request_id)
        if reply.code not in _WORKER_ERRORS or not final or frames:
            raise ProtocolError(f"error code {reply.code!r} is not allowed in this message of a worker")
        return reply
    if not isinstance(reply, ScoreReply | RowsReply):
        raise ProtocolError(f"{type(reply).__name__} is not a valid reply of a worker")
    _same("request_id", reply.request_id, job.request.request_id)
    _same("token_digest", reply.token_digest, job.digest)
    _same("model_fingerprint", reply.model_fingerprint, hello.model_fingerprint)
    _same("worker", reply.worker, hello.name)
    if isinstance(reply, ScoreReply):
        _check_scores(job, reply)
        if not final:
            raise ProtocolError("scores in a part of a stream; they must be one message")
    else:
        _check_rows(job, hello, reply, final=final)
    check_reply(reply, frames)
    if isinstance(reply, ScoreReply) and isinstance(job.request, ScoreRequest):
        check_scores(reply, frames, job.request.n_vocab or hello.vocab_size)
    return reply


def _check_scores(job: Job, reply: ScoreReply) -> None:
    request = job.request
    if not isinstance(request, ScoreRequest):
        raise ProtocolError("scores as the reply to a request for the LM head")
    _same("signal", reply.signal, request.signal)
    _same("n_rows", reply.n_rows, request.n_rows)
    _same("k", reply.k, request.k)
    _same("wire", reply.wire, request.wire)
    _same("adaptive", reply.adaptive, request.mass > 0)
    _same("with_sampled", reply.with_sampled, request.with_sampled)


def _check_rows(job: Job, hello: WorkerHello, reply: RowsReply, *, final: bool) -> None:
    request = job.request
    if isinstance(request, HeadRequest):
        signal, n_rows, n_cols = "head", hello.vocab_size, hello.hidden_size
    else:
        signal, n_rows = request.signal, request.n_rows
        n_cols = hello.hidden_size if signal == "hidden" else request.n_vocab or hello.vocab_size
    _same("signal", reply.signal, signal)
    _same("n_rows", reply.n_rows, n_rows)
    _same("n_cols", reply.n_cols, n_cols)
    _same("stream_id", reply.stream_id, job.stream_id)
    _same("index", reply.index, job.n_parts)
    _same("start", reply.start, job.n_rows)
    _same("last", final, reply.stop == reply.n_rows)
    job.n_parts, job.n_rows = job.n_parts + 1, reply.stop


def _same(field: str, got: object, expected: object) -> None:
    if got != expected:
        shown = (value.hex() if isinstance(value, bytes) else value for value in (got, expected))
        raise ProtocolError("{} is {}, expected {}".format(field, *shown))
