"""Queue requests, assign them to workers, and requeue the requests of lost workers.

Pure bookkeeping without sockets. The time is an argument, so each rule is tested in microseconds.

    submit -> queue -> assign -> worker -> complete
                ^                  |
                +-- lose, retry ---+        a lost worker's jobs go back to the head of the queue

Assignment uses credit: a worker announces how many tokens of unfinished requests it accepts. The
outstanding tokens are computed here from the assigned jobs, so no counter on the wire can drift. A prompt that several
outstanding sequences share counts once, if the worker's engine computes it once.
Clients of one teacher are served round-robin, so a long queue of one client does not delay the others. A request goes
to the worker that had its prompt last: its engine may still have what it computed for that prompt.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from teacher_server.broker.job import Job, Worker
from teacher_server.wire.protocol import Work
from teacher_server.wire.worker_protocol import Prompt, WorkerHello

Admission = Literal["queued", "known", "full"]
_OWNER_SHARE = 4  # a prompt's last worker may have more tokens than another one, by this part of its credit
_JOB_OVERHEAD_BYTES = 1024  # Python objects and headers of a queued job, so that tiny jobs count too


class RequestQueue:
    """Jobs and workers of one broker.

    Args:
        epoch: 8 random bytes of this broker process, so that no reply to a job of an earlier process matches.
        max_queue_bytes: limit on the bytes of queued requests; beyond it clients get the error `busy`.
        max_attempts: a job is given up after this many workers were lost with it, because it may be the cause.
    """

    def __init__(self, epoch: bytes, max_queue_bytes: int, max_attempts: int = 5) -> None:
        self.workers: dict[bytes, Worker] = {}
        self.n_queued = 0
        self.queued_bytes = 0
        self.n_retried = 0
        self._epoch = epoch
        self._max_queue_bytes = max_queue_bytes
        self._max_attempts = max_attempts
        self._queues: dict[str, dict[bytes, deque[Job]]] = {}  # teacher -> client -> its jobs; the first client is next
        self._jobs: dict[bytes, Job] = {}
        self._by_key: dict[tuple[bytes, bytes], Job] = {}
        self._owners = PromptOwners()
        self._n_made = self._n_attempts = 0

    @property
    def n_jobs(self) -> int:
        """Number of jobs, queued and assigned."""
        return len(self._jobs)

    def n_queued_for(self, teacher: str) -> int:
        return sum(len(jobs) for jobs in self._queues.get(teacher, {}).values())

    # Jobs

    def submit(
        self,
        client: bytes,
        teacher: str,
        request: Work,
        payload: list[Any],
        digest: bytes,
        n_bytes: int,
        now_s: float,
        prompts: Sequence[Prompt] = (),
    ) -> Admission:
        """Queue a request. A resend of an unfinished request only renews its deadline (`known`)."""
        queued = self._by_key.get((client, request.request_id))
        if queued is not None:
            queued.deadline_s = now_s + request.deadline_s
            return "known"
        n_bytes += _JOB_OVERHEAD_BYTES
        if self.n_queued and self.queued_bytes + n_bytes > self._max_queue_bytes:
            return "full"
        self._n_made += 1
        job_id = self._epoch + self._n_made.to_bytes(8, "little")
        job = Job(
            job_id, client, teacher, request, payload, digest, now_s, now_s + request.deadline_s, n_bytes, prompts
        )
        self._jobs[job_id] = self._by_key[job.key] = job
        self._enqueue(job, first=False)
        return "queued"

    def find(self, job_id: bytes) -> Job | None:
        return self._jobs.get(job_id)

    def find_request(self, client: bytes, request_id: bytes) -> Job | None:
        return self._by_key.get((client, request_id))

    def assign(self) -> Iterator[tuple[bytes, Job]]:
        """Yield the (worker, job) pairs to send now.

        Clients are served round-robin, each with its oldest job. Among the workers with credit it gets the one with the
        fewest outstanding tokens, or the one that had its prompt last, if that has not many more. A job that finds no
        credit reserves a worker: smaller jobs of the clients after it would otherwise use up each credit that returns.
        """
        for teacher, clients in self._queues.items():
            assigned = True
            reserved = dict[bytes, Job]()
            while assigned:
                assigned = False
                for client in list(clients):
                    identity = self._choose_worker(teacher, clients[client][0], reserved)
                    if identity is not None:
                        assigned = True
                        yield identity, self._assign_next(identity, clients, client)

    def _assign_next(self, identity: bytes, clients: dict[bytes, deque[Job]], client: bytes) -> Job:
        jobs = clients.pop(client)
        job = jobs.popleft()
        if jobs:
            clients[client] = jobs  # at the end: all other clients come first
        self.n_queued -= 1
        self.queued_bytes -= job.n_bytes
        self._n_attempts += 1
        job.worker = identity
        job.attempts = job.attempts + 1
        job.stream_id = self._epoch + self._n_attempts.to_bytes(8, "little")
        job.n_parts = job.n_rows = 0
        self.workers[identity].take(job)
        if self.workers[identity].hello.prefix_block:
            self._owners.record(job, identity)
        return job

    def _choose_worker(self, teacher: str, job: Job, reserved: dict[bytes, Job]) -> bytes | None:
        """Return a worker with credit that no other job has reserved; if there is none, reserve one and return None."""
        able = {k: w for k, w in self.workers.items() if w.hello.teacher == teacher and not w.leaving}
        # Without another worker, one that failed on this job or is too small for it gets it, and replies with an error.
        able = {k: w for k, w in able.items() if w.hello.name not in job.failed_workers} or able
        able = {k: w for k, w in able.items() if w.hello.max_tokens >= job.longest} or able
        costs = {k: w.cost(job) for k, w in able.items()}
        free = {k: w for k, w in able.items() if reserved.get(k, job) is job}
        loads = {k: w.n_tokens + costs[k] for k, w in free.items() if w.has_credit(costs[k])}
        if not loads:
            if free and job not in reserved.values():
                reserved[min(free, key=lambda k: (free[k].n_tokens + costs[k], k))] = job
            return None
        least = min(loads, key=lambda k: (loads[k], k))
        # Requests of several prompts may form a chain, in which each has a prompt of the one before. Without a limit a
        # worker would get all of them, while others wait for work.
        near = {
            k: able[k].hello.prefix_block
            for k, load in loads.items()
            if load <= loads[least] + able[k].hello.credit_tokens // _OWNER_SHARE
        }
        return self._owners.preferred(job, near) or least

    def complete(self, worker: bytes, job_id: bytes) -> Job | None:
        """Remove and return a finished job. Returns None if it was completed or dropped before."""
        if worker in self.workers:
            self.workers[worker].release(job_id)
        job = self._jobs.get(job_id)
        # The end of a stream counts only if the same worker sent its beginning.
        if job is None or (job.is_stream and job.worker != worker):
            return None
        self.drop(job)
        return job

    def expire(self, now_s: float) -> list[Job]:
        """Drop and return the jobs whose deadline has passed, queued or assigned. The caller notifies `Job.worker`."""
        late = [job for job in self._jobs.values() if job.deadline_s < now_s]
        for job in late:
            self.drop(job)
        return late

    def retry(self, job: Job, failed_on: str) -> bool:
        """Requeue a job on which the engine of worker `failed_on` failed. False: it has no other worker or attempt."""
        names = {w.hello.name for w in self.workers.values() if w.hello.teacher == job.teacher and not w.leaving}
        if job.attempts >= self._max_attempts or not names - job.failed_workers - {failed_on}:
            return False
        job.failed_workers.add(failed_on)
        return self._requeue(job)

    def _requeue(self, job: Job) -> bool:
        self._release(job)
        if job.attempts >= self._max_attempts:
            self.drop(job)
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

    def drop(self, job: Job) -> None:
        """Forget a job. The caller notifies `Job.worker`."""
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

    def heartbeat(self, worker: bytes, hello: WorkerHello, now_s: float) -> bool:
        """Record a heartbeat. Returns True if this worker is new, or was lost before."""
        registered = self.workers.get(worker)
        if registered is None:
            self.workers[worker] = Worker(hello, now_s, leaving=hello.leaving)
            return True
        registered.hello = hello
        registered.last_heard_s = now_s
        registered.leaving = registered.leaving or hello.leaving
        return False

    def remove_worker(self, worker: bytes, *, blame: bool = True) -> list[Job]:
        """Remove a worker and requeue its jobs. Return those that are given up, because they have no attempts left.

        Args:
            blame: count it as an attempt of its jobs. False if the worker has only reconnected.
        """
        removed = self.workers.pop(worker, None)
        given_up: list[Job] = []
        for job_id in reversed(removed.outstanding if removed else {}):
            job = self._jobs.get(job_id)
            if job is None or job.worker != worker:
                continue  # completed, expired, or assigned to another worker
            job.attempts -= not blame
            if not self._requeue(job):
                given_up.append(job)
        return given_up

    def silent_workers(self, now_s: float, timeout_s: float) -> list[bytes]:
        """Return workers that have sent no heartbeat for longer than `timeout_s`."""
        return [identity for identity, worker in self.workers.items() if now_s - worker.last_heard_s > timeout_s]

    def drained_workers(self) -> list[bytes]:
        """Return workers that are leaving and have no outstanding jobs."""
        return [identity for identity, worker in self.workers.items() if worker.leaving and not worker.outstanding]

    def record_completed(self, worker: bytes, job: Job, queue_s: float, compute_s: float) -> None:
        """Update the counters and mean times of `worker` for the status table."""
        stats = self.workers.get(worker)
        if stats is not None:
            stats.n_done += 1
            stats.n_tokens_done += job.n_tokens
            share = max(0.01, 1 / stats.n_done)  # moving mean over about a hundred requests, exact for the first ones
            stats.queue_s += share * (queue_s - stats.queue_s)
            stats.compute_s += share * (compute_s - stats.compute_s)


_MOST = 4096  # prompts; the least recently used is forgotten


class PromptOwners:
    """The last worker of each prompt, for the prompts of the latest requests."""

    def __init__(self) -> None:
        # Key: teacher, digest of a prompt. The least recently used is the first.
        self._owners: dict[tuple[str, int], bytes] = {}

    def __len__(self) -> int:
        return len(self._owners)

    def record(self, job: Job, worker: bytes) -> None:
        """Record that `worker` gets `job`."""
        for prompt in job.prompts:
            key = job.teacher, prompt.digest
            self._owners.pop(key, None)
            self._owners[key] = worker
        while len(self._owners) > _MOST:
            del self._owners[next(iter(self._owners))]

    def preferred(self, job: Job, blocks: Mapping[bytes, int]) -> bytes | None:
        """Return the worker that had most of the job's prompt tokens; None if none had any.

        Args:
            blocks: identity of a worker -> `Engine.prefix_block`, of the workers to choose from.
        """
        tokens: Counter[bytes] = Counter()
        for (n_prompt, _), prompt in zip(job.sequences, job.prompts, strict=False):  # without prompts: of the LM head
            owner = self._owners.get((job.teacher, prompt.digest)) or self._owners.get((job.teacher, prompt.parent))
            if owner is not None and n_prompt > blocks.get(owner, n_prompt) > 0:
                tokens[owner] += n_prompt
        return max(tokens, key=tokens.__getitem__) if tokens else None
