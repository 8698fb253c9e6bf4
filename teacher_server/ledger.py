"""Who asked for what, who works on it, and what to do when someone is gone: the broker's memory.

Pure bookkeeping: no sockets, and the time is an argument, so each rule is tested in microseconds.

    submit -> queue -> assign -> worker -> complete
                ^                  |
                +------ lose ------+        a lost worker's jobs go back to the head of the queue

Dispatch is by credit: a worker announces how many tokens of unfinished work it takes, and what is
outstanding is counted here from assigned jobs, so there is no counter on the wire that could drift.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from teacher_server.backplane import WorkerHello
from teacher_server.protocol import ScoreRequest

Admission = Literal["queued", "known", "full"]
_JOB_OVERHEAD_BYTES = 1024  # Python objects and headers of a queued job, so that tiny jobs count too


@dataclass(slots=True, eq=False)
class Job:
    """One admitted request, until it is answered or dropped."""

    job_id: bytes
    client: bytes
    request: ScoreRequest
    payload: list[Any]  # the client's frames as they came, kept to be forwarded (again)
    arrived_s: float
    deadline_s: float  # absolute, on the caller's clock
    n_bytes: int
    attempts: int = 0
    worker: bytes | None = None  # None: in the queue

    @property
    def key(self) -> tuple[bytes, bytes]:
        return self.client, self.request.request_id


@dataclass(slots=True)
class Worker:
    hello: WorkerHello
    last_heard_s: float
    outstanding: dict[bytes, int] = field(default_factory=dict)  # job_id -> tokens
    n_tokens: int = 0

    def has_credit(self, n_tokens: int) -> bool:
        # An idle worker takes a sequence longer than its whole credit; else nobody ever would.
        return not self.outstanding or self.n_tokens + n_tokens <= self.hello.credit_tokens


class Ledger:
    """All jobs and workers of one broker.

    Args:
        epoch: 8 random bytes of this broker process; a reply to an earlier one's job matches nothing.
        max_queue_bytes: requests waiting for a worker; beyond it clients are told `busy`.
        max_attempts: workers a job may lose before it is suspected to be what kills them.
    """

    def __init__(self, epoch: bytes, max_queue_bytes: int, max_attempts: int = 5) -> None:
        self.workers: dict[bytes, Worker] = {}
        self.queued_bytes = 0
        self._epoch = epoch
        self._max_queue_bytes = max_queue_bytes
        self._max_attempts = max_attempts
        self._queue: deque[Job] = deque()
        self._jobs: dict[bytes, Job] = {}
        self._by_key: dict[tuple[bytes, bytes], Job] = {}
        self._n_made = 0

    @property
    def n_queued(self) -> int:
        return len(self._queue)

    def submit(self, client: bytes, request: ScoreRequest, payload: list[Any], n_bytes: int, now_s: float) -> Admission:
        """Queue a request. A resend of one still here only renews its deadline (`known`)."""
        known = self._by_key.get((client, request.request_id))
        if known is not None:
            known.deadline_s = now_s + request.deadline_s
            return "known"
        n_bytes += _JOB_OVERHEAD_BYTES
        if self._queue and self.queued_bytes + n_bytes > self._max_queue_bytes:
            return "full"
        self._n_made += 1
        job_id = self._epoch + self._n_made.to_bytes(8, "little")
        job = Job(job_id, client, request, payload, now_s, now_s + request.deadline_s, n_bytes)
        self._jobs[job_id] = self._by_key[job.key] = job
        self._queue.append(job)
        self.queued_bytes += n_bytes
        return "queued"

    def assign(self) -> Iterator[tuple[bytes, Job]]:
        """(worker, job) pairs to send now, oldest job first, to the worker with least to do."""
        while self._queue and self.workers:
            job = self._queue[0]
            identity, worker = min(self.workers.items(), key=lambda item: item[1].n_tokens)
            n_tokens = job.request.total_length
            if not worker.has_credit(n_tokens):
                return
            self._queue.popleft()
            self.queued_bytes -= job.n_bytes
            job.worker = identity
            job.attempts += 1
            worker.outstanding[job.job_id] = n_tokens
            worker.n_tokens += n_tokens
            yield identity, job

    def complete(self, worker: bytes, job_id: bytes) -> Job | None:
        """The job this answers, or None if someone answered before or nobody waits any more."""
        sender = self.workers.get(worker)
        if sender is not None:
            sender.n_tokens -= sender.outstanding.pop(job_id, 0)
        job = self._jobs.get(job_id)
        if job is not None:
            self._forget(job)
        return job

    def hello(self, worker: bytes, hello: WorkerHello, now_s: float) -> bool:
        """Note a sign of life; True if this worker is new (or was thought lost)."""
        known = self.workers.get(worker)
        if known is None:
            self.workers[worker] = Worker(hello, now_s)
            return True
        known.hello, known.last_heard_s = hello, now_s
        return False

    def lose(self, worker: bytes) -> list[Job]:
        """Forget a worker and requeue what it had; returns the jobs that are given up instead."""
        gone = self.workers.pop(worker, None)
        given_up: list[Job] = []
        for job_id in reversed(gone.outstanding if gone else {}):
            job = self._jobs.get(job_id)
            if job is None or job.worker != worker:
                continue  # answered, expired, or already with someone else
            if job.attempts >= self._max_attempts:
                self._forget(job)
                given_up.append(job)
                continue
            job.worker = None
            self._queue.appendleft(job)
            self.queued_bytes += job.n_bytes
        return given_up

    def silent(self, now_s: float, timeout_s: float) -> list[bytes]:
        """Workers not heard of for longer than `timeout_s`."""
        return [identity for identity, worker in self.workers.items() if now_s - worker.last_heard_s > timeout_s]

    def expire(self, now_s: float) -> list[Job]:
        """Drop and return the jobs whose deadline has passed, wherever they are."""
        late = [job for job in self._jobs.values() if job.deadline_s < now_s]
        for job in late:
            self._forget(job)
        return late

    def _forget(self, job: Job) -> None:
        del self._jobs[job.job_id], self._by_key[job.key]
        if job.worker is None:
            self._queue.remove(job)
            self.queued_bytes -= job.n_bytes
