"""Process the messages of workers: join, check and forward replies, exclude, drain, and detect lost workers."""

from __future__ import annotations

import logging
import queue
import time
from typing import Literal, NamedTuple

import zmq

from teacher_server.broker.job import Job, check_worker_reply
from teacher_server.broker.outbox import Outbox
from teacher_server.broker.request_queue import RequestQueue
from teacher_server.broker.status_board import StatusBoard, store
from teacher_server.broker.teachers import Teachers
from teacher_server.wire.protocol import ErrorReply, GenerateReply, ProtocolError, RowsReply, ScoreRequest, replies
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

_MAX_CHARS = 1000  # largest length of a text that a worker chooses
Process = tuple[str, str, int, bytes]  # name, host, pid (may repeat in another container), nonce


class WorkerEvent(NamedTuple):
    """Event for the supervisor. `text` is the reason of `refused` and `excluded`. `leaving`: a
    drain by name has begun. `left`: not drained.
    """

    kind: Literal["ready", "refused", "excluded", "leaving", "dismissed", "left", "drained"]
    name: str
    text: str


class WorkerRegistry:
    """Workers of one broker."""

    def __init__(self, request_queue: RequestQueue, teachers: Teachers, board: StatusBoard, outbox: Outbox) -> None:
        self.events: queue.SimpleQueue[WorkerEvent] = queue.SimpleQueue()
        self._queue = request_queue
        self._teachers = teachers
        self._board = board
        self._outbox = outbox
        self._banned: dict[Process, str] = {}  # process -> why it was excluded
        self._leaving: dict[Process, str] = {}  # process -> name; a new connection must not undo a drain
        self._dismissed: dict[bytes, str] = {}  # identity -> name; its last hello can arrive after the dismissal

    def on_message(self, socket: zmq.Socket[bytes], identity: bytes, frames: list[zmq.Frame], *, local: bool) -> None:
        """Process one message. `local`: it came over the private socket of the local workers."""
        try:
            if not frames:
                raise ProtocolError("empty message")
            message = from_worker.decode(frames[0].buffer)
        except ProtocolError as error:
            if identity in self._queue.workers:
                self._exclude(identity, f"it sent an unreadable message: {error}")
            else:
                log.error("dropped a message from the unknown worker %s: %s", identity.hex(), error)
            return
        if isinstance(message, WorkerHello):
            self._on_hello(socket, identity, message, local=local)
        else:
            self._on_result(identity, message, frames[1:])

    # Registration

    def _on_hello(self, socket: zmq.Socket[bytes], identity: bytes, hello: WorkerHello, *, local: bool) -> None:
        if identity in self._dismissed:
            return
        if identity not in self._queue.workers:
            self._outbox.add_worker(identity, socket)
            if reason := self._refusal(hello, local=local)[:_MAX_CHARS]:
                log.error("worker %s of %s cannot join: %s", hello.name, hello.host, reason)
                self._outbox.to_worker(identity, Dismiss(why=reason))
                self._outbox.remove_worker(identity)
                if local:  # the supervisor stops the server for a local worker only
                    self.events.put(WorkerEvent("refused", hello.name, reason))
                return
        hello.leaving = hello.leaving or _process(hello) in self._leaving
        if self._queue.heartbeat(identity, hello, time.monotonic()):
            log.info("worker %s joined: %s on %s, %s", hello.name, hello.engine, hello.host, hello.device)
            self.events.put(WorkerEvent("ready", hello.name, ""))

    def _refusal(self, hello: WorkerHello, *, local: bool) -> str:
        process = _process(hello)
        if not local and LOCAL_WORKER_NAME.fullmatch(hello.name):
            return f"the name {hello.name} is reserved for local workers of the server"
        if process in self._banned:
            return self._banned[process]
        for other, worker in list(self._queue.workers.items()):
            if _process(worker.hello) == process:
                # After a broken connection a worker uses another identity, and has dropped its requests.
                self.mark_lost(other, "it reconnected", blame=False)
            elif worker.hello.name == hello.name:
                return f"the name {hello.name} is used by another worker, on {worker.hello.host}"
        return self._teachers.refusal(hello)

    def mark_lost_by_name(self, name: str, reason: str) -> None:
        for identity in [key for key, worker in self._queue.workers.items() if worker.hello.name == name]:
            self.mark_lost(identity, reason)

    def mark_lost(self, identity: bytes, reason: str, *, blame: bool = True) -> None:
        """Remove a worker and requeue its requests. Requests without attempts left are refused."""
        worker = self._queue.workers[identity]
        log.warning("lost worker %s (%s); %d requests requeued", worker.hello.name, reason, len(worker.outstanding))
        self._board.lost_worker()
        self._outbox.remove_worker(identity)
        n_retried = self._queue.n_retried
        given_up = self._queue.remove_worker(identity, blame=blame)
        self._board.retried(self._queue.n_retried - n_retried)
        for job in given_up:
            text = f"{job.attempts} workers were lost during this request, the last one because: {reason}"
            self._outbox.refuse_job(job, "worker_lost", text)

    def drain(self, name: str) -> int:
        """Assign no new requests to a worker, and return the number of its unfinished ones.

        Raises LookupError: no worker has, or had, this name.
        """
        workers = [worker for worker in self._queue.workers.values() if worker.hello.name == name]
        if not workers and name not in self._leaving.values():
            raise LookupError(f"no worker {name!r} on this server; `status` lists the workers")
        for worker in workers:
            worker.leaving = True
            store(self._leaving, _process(worker.hello), name)
            self.events.put(WorkerEvent("leaving", name, ""))
        return sum(len(worker.outstanding) for worker in workers)

    def dismiss_drained(self) -> None:
        """Dismiss the workers that are leaving and have no unfinished requests."""
        for identity in self._queue.drained_workers():
            hello = self._queue.workers[identity].hello
            log.info("dismissed worker %s", hello.name)
            self._outbox.to_worker(identity, Dismiss())
            self._outbox.remove_worker(identity)
            self._queue.remove_worker(identity)
            store(self._dismissed, identity, hello.name)
            self.events.put(WorkerEvent("dismissed" if _process(hello) in self._leaving else "left", hello.name, ""))

    def _exclude(self, identity: bytes, reason: str) -> None:
        hello = self._queue.workers[identity].hello
        reason = reason[:_MAX_CHARS]
        log.error("excluded worker %s of %s (%s): %s", hello.name, hello.host, hello.device, reason)
        store(self._banned, _process(hello), reason)
        self._board.excluded(hello.name, reason)
        self._outbox.to_worker(identity, Dismiss(why=reason))
        self.events.put(WorkerEvent("excluded", hello.name, reason))
        self.mark_lost(identity, f"excluded: {reason}")

    # Results

    def _on_result(self, identity: bytes, message: Part | Done, frames: list[zmq.Frame]) -> None:
        worker = self._queue.workers.get(identity)
        job = self._queue.find(message.job_id)
        if worker is None:
            return  # marked lost, and its requests are requeued; its next hello registers it again
        final = isinstance(message, Done)
        # The job was dropped, or is assigned to another worker. Only a complete reply is useful then.
        if job is None or (job.worker != identity and job.is_stream):
            worker.release(message.job_id)
            return
        try:
            if not frames:
                raise ProtocolError("a result without a reply")
            reply = replies.decode(frames[0].buffer)
            if isinstance(reply, RowsReply) and job.is_stream and reply.stream_id != job.stream_id:
                return  # an earlier attempt's rows: the worker has not noticed that it was marked lost
            checked = check_worker_reply(job, worker.hello, reply, [frame.buffer for frame in frames[1:]], final=final)
        except ProtocolError as error:
            self._exclude(identity, str(error))
            return
        if isinstance(checked, ErrorReply):
            self._on_error(identity, job, checked, frames)
            return
        if final:
            if job.worker not in (None, identity):  # the job was assigned to another worker in the meantime
                self._outbox.to_worker(job.worker, JobCancel(job_id=job.job_id))
            self._queue.complete(identity, job.job_id)
            self._queue.record_completed(identity, job, checked.queue_s, checked.compute_s)
            signal = "generate" if isinstance(checked, GenerateReply) else checked.signal
            n_tokens = job.request.total_length if isinstance(job.request, ScoreRequest) else 0
            self._board.completed(job.teacher, signal, n_tokens, checked.queue_s, checked.compute_s)
        self._outbox.to_client(job.client, frames)

    def _on_error(self, identity: bytes, job: Job, error: ErrorReply, frames: list[zmq.Frame]) -> None:
        worker = self._queue.workers[identity]
        if job.worker != identity:
            worker.release(job.job_id)
            return
        if error.code == "engine" and self._queue.retry(job, failed_on=worker.hello.name):
            self._board.retried(1)
            log.warning("worker %s failed on a request (%s); another worker retries", worker.hello.name, error.text)
            return
        self._queue.complete(identity, job.job_id)
        if error.code != "units":  # the worker asks for a map, with which the request comes again
            self._board.refused(error.code)
        self._outbox.to_client(job.client, frames)


def _process(hello: WorkerHello) -> Process:
    return hello.name, hello.host, hello.pid, hello.nonce
