"""A request at the broker, a worker with the requests that it has, and the checks of the worker's replies.

A worker whose reply fails a check is excluded, and other workers repeat its requests. A faulty GPU, a wrong
build or a damaged network buffer therefore costs time, but never gives wrong numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from teacher_server.wire.answers import unpack_answers
from teacher_server.wire.payload import check_reply, check_scores
from teacher_server.wire.protocol import (
    Buffer,
    ErrorReply,
    GenerateReply,
    GenerateRequest,
    HeadRequest,
    Id,
    ProtocolError,
    RowsReply,
    ScoreReply,
    ScoreRequest,
    ServerMessage,
    Work,
)
from teacher_server.wire.worker_protocol import Prompt, WorkerHello, computed_tokens


@dataclass(slots=True, eq=False)
class Job:
    """One admitted request, until it is completed or dropped."""

    job_id: bytes
    client: bytes
    teacher: str
    request: Work
    payload: list[Any]  # the client's frames, kept so that they can be assigned again
    digest: Id  # digest of the tokens; zeros for the LM head
    arrived_s: float
    deadline_s: float  # absolute, on the caller's clock
    n_bytes: int
    prompts: Sequence[Prompt] = ()  # prompt of each sequence; empty for the LM head
    attempts: int = 0
    worker: bytes | None = None  # None: in the queue
    failed_workers: set[str] = field(default_factory=set)  # names of workers whose engine failed on it
    # Messages and rows of the stream that the current worker has sent.
    stream_id: bytes = b""
    n_parts: int = 0
    n_rows: int = 0

    @property
    def key(self) -> tuple[bytes, bytes]:
        return self.client, self.request.request_id

    @property
    def n_tokens(self) -> int:
        if isinstance(self.request, GenerateRequest):
            return sum(self.request.lengths)  # the answers' lengths are not known yet
        return self.request.total_length if isinstance(self.request, ScoreRequest) else 1

    @property
    def sequences(self) -> Sequence[tuple[int, int]]:
        """Return (P, P + R) of each sequence to score."""
        return self.request.sequences if isinstance(self.request, ScoreRequest) else ()

    @property
    def longest(self) -> int:
        """Return the tokens of its longest sequence."""
        if isinstance(self.request, GenerateRequest):
            return max(self.request.lengths) + self.request.max_tokens
        return max((n_total for _, n_total in self.sequences), default=1)

    @property
    def is_stream(self) -> bool:
        if isinstance(self.request, ScoreRequest):
            return self.request.signal in ("logits", "hidden")
        return isinstance(self.request, HeadRequest)


@dataclass(slots=True)
class Worker:
    """One connection of a worker, and the jobs that it has."""

    hello: WorkerHello
    last_heard_s: float
    leaving: bool = False
    outstanding: dict[bytes, tuple[int, list[int]]] = field(default_factory=dict)  # job_id -> (cost, its prompts)
    n_tokens: int = 0  # sum of the costs
    prompts: Counter[int] = field(default_factory=Counter)  # digest -> number of outstanding sequences
    # Figures of the status table.
    n_done: int = 0
    n_tokens_done: int = 0
    tokens_per_s: float = 0.0
    queue_s: float = 0.0
    compute_s: float = 0.0

    def cost(self, job: Job) -> int:
        """Return the tokens that `job` adds: a prompt that this worker has at the moment is computed once."""
        block = self.hello.prefix_block
        if not block or not job.prompts:
            return job.n_tokens
        total = 0
        digests = set[int]()
        for (n_prompt, n_total), (digest, _) in zip(job.sequences, job.prompts, strict=True):
            total += computed_tokens(n_prompt, n_total, block, known=digest in digests or digest in self.prompts)
            digests.add(digest)
        return total

    def has_credit(self, cost: int) -> bool:
        """Return whether it accepts a job of this cost; an idle one also one that is more than its whole credit."""
        return not self.outstanding or self.n_tokens + cost <= self.hello.credit_tokens

    def take(self, job: Job) -> None:
        """Add `job` to the outstanding ones."""
        n_tokens = self.cost(job)
        digests = [prompt.digest for prompt in job.prompts]
        self.outstanding[job.job_id] = n_tokens, digests
        self.n_tokens += n_tokens
        self.prompts.update(digests)

    def release(self, job_id: bytes) -> None:
        """Remove a job, if it is outstanding."""
        if job_id in self.outstanding:
            n_tokens, digests = self.outstanding.pop(job_id)
            self.n_tokens -= n_tokens
            self.prompts -= Counter(digests)  # drops counts of 0


_WORKER_ERRORS = ("engine", "bad_request", "damaged", "deadline", "units")


def check_worker_reply(
    job: Job, hello: WorkerHello, reply: ServerMessage, frames: Sequence[Buffer], *, final: bool
) -> ScoreReply | RowsReply | GenerateReply | ErrorReply:
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
    if not isinstance(reply, ScoreReply | RowsReply | GenerateReply):
        raise ProtocolError(f"{type(reply).__name__} is not a valid reply of a worker")
    _same("request_id", reply.request_id, job.request.request_id)
    _same("token_digest", reply.token_digest, job.digest)
    _same("model_fingerprint", reply.model_fingerprint, hello.model_fingerprint)
    _same("worker", reply.worker, hello.name)
    if isinstance(reply, GenerateReply):
        if not isinstance(job.request, GenerateRequest) or not final:
            raise ProtocolError("answers that were not requested, or in a part of a stream")
        unpack_answers(job.request, reply, frames)
        return reply
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
    for name in ("signal", "n_rows", "k", "wire", "with_sampled"):
        _same(name, getattr(reply, name), getattr(request, name))
    _same("adaptive", reply.adaptive, request.mass > 0)


def _check_rows(job: Job, hello: WorkerHello, reply: RowsReply, *, final: bool) -> None:
    request = job.request
    if isinstance(request, GenerateRequest):
        raise ProtocolError("rows as the reply to a request for answers")
    if isinstance(request, HeadRequest):
        signal = "head"
        n_rows = hello.vocab_size
        n_cols = hello.hidden_size
    else:
        signal = request.signal
        n_rows = request.n_rows
        n_cols = hello.hidden_size if signal == "hidden" else request.n_vocab or hello.vocab_size
    _same("signal", reply.signal, signal)
    _same("n_rows", reply.n_rows, n_rows)
    _same("n_cols", reply.n_cols, n_cols)
    _same("stream_id", reply.stream_id, job.stream_id)
    _same("index", reply.index, job.n_parts)
    _same("start", reply.start, job.n_rows)
    _same("last", final, reply.stop == reply.n_rows)
    job.n_parts = job.n_parts + 1
    job.n_rows = reply.stop


def _same(field: str, got: object, expected: object) -> None:
    if got != expected:
        shown = (value.hex() if isinstance(value, bytes) else value for value in (got, expected))
        raise ProtocolError("{} is {}, expected {}".format(field, *shown))
