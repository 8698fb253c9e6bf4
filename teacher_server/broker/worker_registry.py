"""What the broker does with a worker's message: who may join, whose answers count, who has to go."""

from __future__ import annotations

import logging
import queue
import time
from typing import Literal, NamedTuple, TypeVar

import zmq

from teacher_server.broker.checks import check_answer
from teacher_server.broker.metrics import BrokerMetrics
from teacher_server.broker.outbox import Outbox
from teacher_server.broker.request_queue import Job, RequestQueue
from teacher_server.broker.status_board import StatusBoard
from teacher_server.broker.teachers import Teachers
from teacher_server.wire.protocol import ErrorReply, ProtocolError, RowsReply, ScoreRequest, replies
from teacher_server.wire.worker_protocol import (
    LOCAL_WORKER_NAME,
    Dismiss,
    Done,
    JobCancel,
    Part,
    WorkerHello,
    from_worker,
)

log = logging.getLogger(__name__)

_MAX_NOTES, _MAX_WORDS = 1000, 1000  # a worker's own words may be in them
Process = tuple[str, str, int, bytes]  # name, host, pid (the same in every container), nonce
T = TypeVar("T")


class WorkerEvent(NamedTuple):
    """What the supervisor learns. `text` says why, for refused and excluded."""

    kind: Literal["ready", "refused", "excluded", "dismissed", "drained"]
    name: str
    text: str


class WorkerRegistry:
    """All workers of one broker."""

    def __init__(
        self, ledger: RequestQueue, teachers: Teachers, board: StatusBoard, post: Outbox, metrics: BrokerMetrics | None
    ) -> None:
        self.events: queue.SimpleQueue[WorkerEvent] = queue.SimpleQueue()
        self._ledger, self._teachers, self._board, self._post, self._metrics = ledger, teachers, board, post, metrics
        self._banned: dict[Process, str] = {}  # what it did
        self._leaving: dict[Process, str] = {}  # by name; a new connection must not undo a drain

    def on_message(self, socket: zmq.Socket[bytes], identity: bytes, frames: list[zmq.Frame], *, own: bool) -> None:
        """`own`: it came over the private socket of the workers that this server starts."""
        try:
            if not frames:
                raise ProtocolError("empty message")
            message = from_worker.decode(frames[0].buffer)
        except ProtocolError as error:
            if identity in self._ledger.workers:
                self._exclude(identity, f"it sent an unreadable message: {error}")
            else:
                log.error("dropped a message from the stranger %s: %s", identity.hex(), error)
            return
        if isinstance(message, WorkerHello):
            self._welcome(socket, identity, message, own=own)
        else:
            self._on_result(identity, message, frames[1:])

    # Who is there

    def _welcome(self, socket: zmq.Socket[bytes], identity: bytes, hello: WorkerHello, *, own: bool) -> None:
        if identity not in self._ledger.workers:
            self._post.learn(identity, socket)
            why = self._reason_against(identity, hello, own=own)[:_MAX_WORDS]
            if why:
                log.error("worker %s of %s may not join: %s", hello.name, hello.host, why)
                self._post.to_worker(identity, Dismiss(why=why))
                self._post.unlearn(identity)
                if own:  # the supervisor is not to stop the server for a guest
                    self.events.put(WorkerEvent("refused", hello.name, why))
                return
        hello.leaving = hello.leaving or _process(hello) in self._leaving
        if self._ledger.hello(identity, hello, time.monotonic()):
            log.info("worker %s joined: %s on %s, %s", hello.name, hello.engine, hello.host, hello.device)
            self.events.put(WorkerEvent("ready", hello.name, ""))

    def _reason_against(self, identity: bytes, hello: WorkerHello, *, own: bool) -> str:
        process = _process(hello)
        if not own and LOCAL_WORKER_NAME.fullmatch(hello.name):
            return f"the server names its own workers so: {hello.name}"
        if process in self._banned:
            return self._banned[process]
        for other, worker in list(self._ledger.workers.items()):
            if _process(worker.hello) == process:
                # A broken connection: it starts anew under another identity, and does not have its old work any more.
                self.lose(other, "it connected again", blame=False)
            elif worker.hello.name == hello.name:
                return f"another worker is called {hello.name}, on {worker.hello.host}"
        return self._teachers.refusal(hello)

    def lose_named(self, name: str, why: str) -> None:
        for identity in [key for key, worker in self._ledger.workers.items() if worker.hello.name == name]:
            self.lose(identity, why)

    def lose(self, identity: bytes, why: str, *, blame: bool = True) -> None:
        """What it had goes elsewhere; a request that too many workers were lost with is given up."""
        worker = self._ledger.workers[identity]
        log.warning("lost %s (%s); %d requests go elsewhere", worker.hello.name, why, len(worker.outstanding))
        self._board.n_lost_workers += 1
        if self._metrics is not None:
            self._metrics.lost_worker()
        self._post.unlearn(identity)
        n_retried = self._ledger.n_retried
        given_up = self._ledger.lose(identity, blame=blame)
        self._count_retried(self._ledger.n_retried - n_retried)
        for job in given_up:
            text = f"{job.attempts} workers were lost while they held this request; the last one: {why}"
            self._post.refuse_job(job, "worker_lost", text)

    def _count_retried(self, n: int) -> None:
        if self._metrics is not None and n:
            self._metrics.retried(n)

    def let_leave(self, name: str) -> int:
        """Give a worker nothing new; how many requests it still has. Raises LookupError if there never was one."""
        workers = [worker for worker in self._ledger.workers.values() if worker.hello.name == name]
        if not workers and name not in self._leaving.values():
            raise LookupError(f"no worker {name!r} here; `status` lists them")
        for worker in workers:
            worker.leaving = True
            _remember(self._leaving, _process(worker.hello), name)
        return sum(len(worker.outstanding) for worker in workers)

    def dismiss_leavers(self) -> None:
        """Send home who wants to leave and has nothing left."""
        for identity in self._ledger.leavers():
            name = self._ledger.workers[identity].hello.name
            log.info("worker %s leaves", name)
            self._post.to_worker(identity, Dismiss())
            self._post.unlearn(identity)
            self._ledger.lose(identity)
            self.events.put(WorkerEvent("dismissed", name, ""))

    def _exclude(self, identity: bytes, why: str) -> None:
        hello, why = self._ledger.workers[identity].hello, why[:_MAX_WORDS]
        log.error("excluded worker %s of %s (%s): %s", hello.name, hello.host, hello.device, why)
        _remember(self._banned, _process(hello), why)
        _remember(self._board.excluded, hello.name, why)
        if self._metrics is not None:
            self._metrics.excluded()
        self._post.to_worker(identity, Dismiss(why=why))
        self.events.put(WorkerEvent("excluded", hello.name, why))
        self.lose(identity, f"excluded: {why}")

    # What it did

    def _on_result(self, identity: bytes, message: Part | Done, frames: list[zmq.Frame]) -> None:
        worker, job = self._ledger.workers.get(identity), self._ledger.find(message.job_id)
        if worker is None:
            return  # thought lost, and its work is with others; it joins again with its next hello
        final = isinstance(message, Done)
        # Nobody waits, or someone else is at it: only a whole answer is of use then.
        if job is None or (job.worker != identity and job.is_stream):
            worker.release(message.job_id)
            return
        try:
            if not frames:
                raise ProtocolError("a result without a reply")
            reply = replies.decode(frames[0].buffer)
            if isinstance(reply, RowsReply) and job.is_stream and reply.stream_id != job.stream_id:
                return  # the rest of an earlier attempt, which this worker had lost without knowing
            answer = check_answer(job, worker.hello, reply, [frame.buffer for frame in frames[1:]], final=final)
        except ProtocolError as error:
            self._exclude(identity, str(error))
            return
        if isinstance(answer, ErrorReply):
            self._on_error(identity, job, answer, frames)
            return
        if final:
            if job.worker not in (None, identity):  # it was given to another one in the meantime
                self._post.to_worker(job.worker, JobCancel(job_id=job.job_id))
            self._ledger.complete(identity, job.job_id)
            self._ledger.answered(identity, job, answer.queue_s, answer.compute_s)
            self._board.n_answered += 1
            if self._metrics is not None:
                self._metrics.answered(job.teacher, answer.signal, _n_scored(job), answer.queue_s, answer.compute_s)
        self._post.to_client(job.client, frames)

    def _on_error(self, identity: bytes, job: Job, error: ErrorReply, frames: list[zmq.Frame]) -> None:
        worker = self._ledger.workers[identity]
        if job.worker != identity:
            worker.release(job.job_id)
            return
        if error.code == "engine" and self._ledger.retry(job, failed_on=worker.hello.name):
            self._count_retried(1)
            log.warning("%s could not score a request (%s); another one tries", worker.hello.name, error.text)
            return
        self._ledger.complete(identity, job.job_id)
        self._board.n_errors[error.code] += 1
        if self._metrics is not None:
            self._metrics.refused(error.code)
        self._post.to_client(job.client, frames)


def _process(hello: WorkerHello) -> Process:
    return hello.name, hello.host, hello.pid, hello.nonce


def _remember(notes: dict[T, str], key: T, text: str) -> None:
    """The newest thousand."""
    notes[key] = text
    if len(notes) > _MAX_NOTES:
        del notes[next(iter(notes))]


def _n_scored(job: Job) -> int:
    return job.request.total_length if isinstance(job.request, ScoreRequest) else 0
