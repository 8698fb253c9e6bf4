"""Who asked for what, who works on it, and what to do when someone is gone: the broker's memory.

Pure bookkeeping: no sockets, and the time is an argument, so each rule is tested in microseconds.

    submit -> queue -> assign -> worker -> complete
                ^                  |
                +-- lose, retry ---+        a lost worker's jobs go back to the head of the queue

Dispatch is by credit: a worker announces how many tokens of unfinished work it takes, and what is
outstanding is counted here from assigned jobs, so there is no counter on the wire that could drift.
Clients of one teacher take turns, so a long queue of one of them does not hold up the others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from teacher_server.wire.protocol import Id, ScoreRequest, Work
from teacher_server.wire.worker_protocol import WorkerHello

Admission = Literal["queued", "known", "full"]
_JOB_OVERHEAD_BYTES = 1024  # Python objects and headers of a queued job, so that tiny jobs count too


@dataclass(slots=True, eq=False)
class Job:
    """One admitted request, until it is answered or dropped."""

    job_id: bytes
    client: bytes
    teacher: str
    request: Work
    payload: list[Any]  # the client's frames as they came, kept to be forwarded (again)
    digest: Id  # of its tokens; zeros for the LM head
    arrived_s: float
    deadline_s: float  # absolute, on the caller's clock
    n_bytes: int
    attempts: int = 0
    worker: bytes | None = None  # None: in the queue
    failed_on: set[str] = field(default_factory=set)  # names of workers whose engine could not do it
    # What has been forwarded of a stream by the worker that holds it now.
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
    def is_stream(self) -> bool:
        return not isinstance(self.request, ScoreRequest) or self.request.signal in ("logits", "hidden")


@dataclass(slots=True)
class Worker:
    hello: WorkerHello
    last_heard_s: float
    leaving: bool = False
    outstanding: dict[bytes, int] = field(default_factory=dict)  # job_id -> tokens
    n_tokens: int = 0
    # For the status table.
    n_done: int = 0
    n_tokens_done: int = 0
    tokens_per_s: float = 0.0
    queue_s: float = 0.0
    compute_s: float = 0.0

    def has_credit(self, n_tokens: int) -> bool:
        # An idle worker takes a sequence longer than its whole credit; else nobody ever would.
        return not self.outstanding or self.n_tokens + n_tokens <= self.hello.credit_tokens

    def release(self, job_id: bytes) -> None:
        self.n_tokens -= self.outstanding.pop(job_id, 0)


class RequestQueue:
    """All jobs and workers of one broker.

    Args:
        epoch: 8 random bytes of this broker process; a reply to an earlier one's job matches nothing.
        max_queue_bytes: requests waiting for a worker; beyond it clients are told `busy`.
        max_attempts: workers a job may lose before it is suspected to be what kills them.
    """

    def __init__(self, epoch: bytes, max_queue_bytes: int, max_attempts: int = 5) -> None:
        self.workers: dict[bytes, Worker] = {}
        self.n_queued = 0
        self.queued_bytes = 0
        self.n_retried = 0
        self._epoch = epoch
        self._max_queue_bytes = max_queue_bytes
        self._max_attempts = max_attempts
        self._queues: dict[str, dict[bytes, deque[Job]]] = {}  # teacher -> client -> its jobs; first client is next
        self._jobs: dict[bytes, Job] = {}
        self._by_key: dict[tuple[bytes, bytes], Job] = {}
        self._n_made = self._n_attempts = 0

    @property
    def n_jobs(self) -> int:
        """Queued and assigned."""
        return len(self._jobs)

    def n_queued_for(self, teacher: str) -> int:
        return sum(len(jobs) for jobs in self._queues.get(teacher, {}).values())

    # Jobs

    def submit(
        self, client: bytes, teacher: str, request: Work, payload: list[Any], digest: bytes, n_bytes: int, now_s: float
    ) -> Admission:
        """Queue a request. A resend of one still here only renews its deadline (`known`)."""
        known = self._by_key.get((client, request.request_id))
        if known is not None:
            known.deadline_s = now_s + request.deadline_s
            return "known"
        n_bytes += _JOB_OVERHEAD_BYTES
        if self.n_queued and self.queued_bytes + n_bytes > self._max_queue_bytes:
            return "full"
        self._n_made += 1
        job_id = self._epoch + self._n_made.to_bytes(8, "little")
        job = Job(job_id, client, teacher, request, payload, digest, now_s, now_s + request.deadline_s, n_bytes)
        self._jobs[job_id] = self._by_key[job.key] = job
        self._enqueue(job, first=False)
        return "queued"

    def find(self, job_id: bytes) -> Job | None:
        return self._jobs.get(job_id)

    def find_request(self, client: bytes, request_id: bytes) -> Job | None:
        return self._by_key.get((client, request_id))

    def assign(self) -> Iterator[tuple[bytes, Job]]:
        """(worker, job) pairs to send now: clients in turn, each one's oldest job, to the worker with least to do."""
        for teacher, clients in self._queues.items():
            given = True
            while given:
                given = False
                for client in list(clients):
                    identity = self._choose(teacher, clients[client][0])
                    if identity is not None:
                        given = True
                        yield identity, self._give(identity, clients, client)

    def _give(self, identity: bytes, clients: dict[bytes, deque[Job]], client: bytes) -> Job:
        jobs = clients.pop(client)
        job = jobs.popleft()
        if jobs:
            clients[client] = jobs  # at the end: its next turn comes after everyone else's
        self.n_queued -= 1
        self.queued_bytes -= job.n_bytes
        self._n_attempts += 1
        job.worker, job.attempts = identity, job.attempts + 1
        job.stream_id = self._epoch + self._n_attempts.to_bytes(8, "little")
        job.n_parts = job.n_rows = 0
        worker = self.workers[identity]
        worker.outstanding[job.job_id] = job.n_tokens
        worker.n_tokens += job.n_tokens
        return job

    def _choose(self, teacher: str, job: Job) -> bytes | None:
        able = {k: w for k, w in self.workers.items() if w.hello.teacher == teacher and not w.leaving}
        # Those that failed on this job, or are too small for it, come last: with nobody else there, they say so.
        able = {k: w for k, w in able.items() if w.hello.name not in job.failed_on} or able
        able = {k: w for k, w in able.items() if w.hello.max_tokens >= job.n_tokens} or able
        free = [(w.n_tokens, k) for k, w in able.items() if w.has_credit(job.n_tokens)]
        return min(free)[1] if free else None

    def complete(self, worker: bytes, job_id: bytes) -> Job | None:
        """The job this answers, or None if someone answered before or nobody waits any more."""
        if worker in self.workers:
            self.workers[worker].release(job_id)
        job = self._jobs.get(job_id)
        # The end of a stream counts only with its beginning.
        if job is None or (job.is_stream and job.worker != worker):
            return None
        self._forget(job)
        return job

    def cancel(self, job: Job) -> None:
        """Drop a job; `Job.worker` should be told."""
        self._forget(job)

    def expire(self, now_s: float) -> list[Job]:
        """Drop and return the jobs whose deadline has passed, wherever they are; `Job.worker` should be told."""
        late = [job for job in self._jobs.values() if job.deadline_s < now_s]
        for job in late:
            self._forget(job)
        return late

    def retry(self, job: Job, failed_on: str) -> bool:
        """Put back an assigned job that the engine of `failed_on` could not do; False if there is no other to try."""
        others = {w.hello.name for w in self.workers.values() if w.hello.teacher == job.teacher and not w.leaving}
        if job.attempts >= self._max_attempts or not others - job.failed_on - {failed_on}:
            return False
        job.failed_on.add(failed_on)
        return self._requeue(job)

    def _requeue(self, job: Job) -> bool:
        self._release(job)
        if job.attempts >= self._max_attempts:
            self._forget(job)
            return False
        job.worker = None
        self.n_retried += 1
        self._enqueue(job, first=True)
        return True

    def _enqueue(self, job: Job, *, first: bool) -> None:
        clients = self._queues.setdefault(job.teacher, {})
        jobs = clients.setdefault(job.client, deque())
        if first:
            jobs.appendleft(job)
        else:
            jobs.append(job)
        self.n_queued += 1
        self.queued_bytes += job.n_bytes

    def _release(self, job: Job) -> None:
        if job.worker in self.workers:
            self.workers[job.worker].release(job.job_id)

    def _forget(self, job: Job) -> None:
        del self._jobs[job.job_id], self._by_key[job.key]
        if job.worker is not None:
            self._release(job)
            return
        clients = self._queues[job.teacher]
        clients[job.client].remove(job)
        if not clients[job.client]:
            del clients[job.client]
        self.n_queued -= 1
        self.queued_bytes -= job.n_bytes

    # Workers

    def hello(self, worker: bytes, hello: WorkerHello, now_s: float) -> bool:
        """Note a sign of life; True if this worker is new (or was thought lost)."""
        known = self.workers.get(worker)
        if known is None:
            self.workers[worker] = Worker(hello, now_s, leaving=hello.leaving)
            return True
        known.hello, known.last_heard_s = hello, now_s
        known.leaving = known.leaving or hello.leaving
        return False

    def lose(self, worker: bytes, *, blame: bool = True) -> list[Job]:
        """Forget a worker and requeue what it had; returns the jobs that are given up instead.

        Args:
            blame: count it as an attempt of its jobs; not when it only came back under another identity.
        """
        gone = self.workers.pop(worker, None)
        given_up: list[Job] = []
        for job_id in reversed(gone.outstanding if gone else {}):
            job = self._jobs.get(job_id)
            if job is None or job.worker != worker:
                continue  # answered, expired, or already with someone else
            job.attempts -= not blame
            if not self._requeue(job):
                given_up.append(job)
        return given_up

    def silent(self, now_s: float, timeout_s: float) -> list[bytes]:
        """Workers not heard of for longer than `timeout_s`."""
        return [identity for identity, worker in self.workers.items() if now_s - worker.last_heard_s > timeout_s]

    def leavers(self) -> list[bytes]:
        """Workers that leave and have nothing left to do."""
        return [identity for identity, worker in self.workers.items() if worker.leaving and not worker.outstanding]

    def answered(self, worker: bytes, job: Job, queue_s: float, compute_s: float) -> None:
        """Note a good answer of `worker` for the status table."""
        by = self.workers.get(worker)
        if by is not None:
            by.n_done += 1
            by.n_tokens_done += job.n_tokens
            share = max(0.01, 1 / by.n_done)  # a mean of about a hundred answers, from the first one on
            by.queue_s += share * (queue_s - by.queue_s)
            by.compute_s += share * (compute_s - by.compute_s)
