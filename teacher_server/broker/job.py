"""A request at the broker, and a worker with the requests that it has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from teacher_server.wire.prompts import Prompt, computed_tokens
from teacher_server.wire.protocol import Id, ScoreRequest, Work
from teacher_server.wire.worker_protocol import WorkerHello


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
        return self.request.total_length if isinstance(self.request, ScoreRequest) else 1

    @property
    def sequences(self) -> Sequence[tuple[int, int]]:
        """Return (P, P + R) of each sequence; empty for the LM head."""
        return self.request.sequences if isinstance(self.request, ScoreRequest) else ()

    @property
    def longest(self) -> int:
        """Return the tokens of its longest sequence."""
        return self.request.longest if isinstance(self.request, ScoreRequest) else 1

    @property
    def is_stream(self) -> bool:
        return not isinstance(self.request, ScoreRequest) or self.request.signal in ("logits", "hidden")


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
        total, known = 0, set[int]()
        for (n_prompt, n_total), (digest, _) in zip(job.sequences, job.prompts, strict=True):
            total += computed_tokens(n_prompt, n_total, block, known=digest in known or digest in self.prompts)
            known.add(digest)
        return total

    def has_credit(self, cost: int) -> bool:
        """Return whether it accepts a job of this cost; an idle one also one that is more than its whole credit."""
        return not self.outstanding or self.n_tokens + cost <= self.hello.credit_tokens

    def take(self, job: Job) -> None:
        """Add `job` to the outstanding ones."""
        n_tokens, digests = self.cost(job), [prompt.digest for prompt in job.prompts]
        self.outstanding[job.job_id] = n_tokens, digests
        self.n_tokens += n_tokens
        self.prompts.update(digests)

    def release(self, job_id: bytes) -> None:
        """Remove a job, if it is outstanding."""
        if job_id in self.outstanding:
            n_tokens, digests = self.outstanding.pop(job_id)
            self.n_tokens -= n_tokens
            self.prompts -= Counter(digests)  # drops counts of 0
