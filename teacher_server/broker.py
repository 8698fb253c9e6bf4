"""The broker: one thread between clients and workers, which owns every socket of the server.

    clients  DEALER --tcp--> ROUTER front | ledger | ROUTER back <--ipc/tcp-- DEALER  workers

It moves messages and asks `Ledger` what to do with them. Frames are forwarded as they came,
without a copy. Both sides bring explicit random identities: automatic ones repeat after a restart,
and then a reply can reach the wrong requester. There is no message the broker waits for, so none
whose loss could wedge it.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import zmq

from teacher_server.backplane import Assignment, Done, WorkerHello, from_worker, to_worker
from teacher_server.errors import ServerError
from teacher_server.ledger import Ledger
from teacher_server.protocol import (
    ID_BYTES,
    MAX_FRAME_BYTES,
    NO_REQUEST,
    PROTOCOL_VERSION,
    ErrorCode,
    ErrorReply,
    InfoReply,
    InfoRequest,
    Ping,
    Pong,
    ProtocolError,
    ScoreRequest,
    ServerMessage,
    replies,
    requests,
)

log = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
WORKER_TIMEOUT_S = 10.0  # ten lost heartbeats; a local worker's death is reported at once instead
_TICK_S = 0.1  # how late a deadline or a lost worker may be noticed
_BURST = 64  # messages read from one socket before the others get their turn


class WorkerEvent(NamedTuple):
    """What the supervisor learns: a worker joined, or was refused (`text` says why)."""

    kind: Literal["ready", "refused"]
    name: str
    text: str


class Broker:
    """Runs in its own thread from `start` to `stop`; binding happens in the constructor.

    Args:
        host, port: where clients connect; port 0 picks a free one, see `port`.
        backend: ZMQ endpoint workers connect to.
        max_queue_bytes: bound on requests that wait for a worker.

    Raises:
        ServerError: the address cannot be bound.
    """

    def __init__(self, host: str, port: int, backend: str, max_queue_bytes: int = 256 << 20) -> None:
        self.events: queue.SimpleQueue[WorkerEvent] = queue.SimpleQueue()
        self._epoch = os.urandom(ID_BYTES)
        self._ledger = Ledger(self._epoch[:8], max_queue_bytes)
        self._context = zmq.Context()
        self._context.setsockopt(zmq.LINGER, 0)
        try:
            self._front = self._router(f"tcp://{host}:{port}", port_flag="--port")
            self._back = self._router(backend, port_flag="the worker endpoint")
        except ServerError:
            self._context.destroy(linger=0)
            raise
        self.port = int(self._front.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        control = f"inproc://control-{self._epoch.hex()}"
        self._control_in = self._context.socket(zmq.PAIR)
        self._control_in.bind(control)
        self._control_out = self._context.socket(zmq.PAIR)
        self._control_out.connect(control)
        self._thread = threading.Thread(target=self._run, name="broker", daemon=True)

    def _router(self, endpoint: str, port_flag: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a client that reconnects takes over its old identity
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # sending to someone gone is an error we see
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        # High-water marks count messages. What is under way to a worker is bounded by its credit, to a
        # client by its window; a mark below these would drop messages that are wanted.
        socket.setsockopt(zmq.SNDHWM, 0)
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            fix = "stop the process that holds it, or choose another" if error.errno == zmq.EADDRINUSE else "change"
            raise ServerError(f"cannot listen on {endpoint}: {error.strerror}. Fix: {fix} {port_flag}.") from error
        return socket

    def start(self) -> None:
        self._thread.start()

    @property
    def alive(self) -> bool:
        """False once the thread has ended, by `stop` or by a bug (which is in the log)."""
        return self._thread.is_alive()

    def worker_died(self, name: str) -> None:
        """Tell it that the local worker process `name` has ended; call from one thread only."""
        self._control_out.send(name.encode())

    def stop(self) -> None:
        """Stop and close every socket; bounded by about one tick. Requests not answered are dropped."""
        self._control_out.send(b"")
        self._thread.join(timeout=1.0)
        self._control_out.close(linger=0)
        self._context.destroy(linger=0)

    # The loop

    def _run(self) -> None:
        try:
            poller = zmq.Poller()
            for socket in (self._front, self._back, self._control_in):
                poller.register(socket, zmq.POLLIN)
            next_tick_s = 0.0
            while True:
                ready = dict(poller.poll(int(_TICK_S * 1000)))
                if self._control_in in ready:
                    name = self._control_in.recv().decode()
                    if not name:
                        return
                    self._lose_named(name)
                if self._back in ready:
                    self._drain(self._back, self._on_worker)
                if self._front in ready:
                    self._drain(self._front, self._on_client)
                now_s = time.monotonic()
                if now_s >= next_tick_s:
                    self._tick(now_s)
                    next_tick_s = now_s + _TICK_S
                self._dispatch()
        except Exception:
            log.exception("broker stopped by a bug")  # the supervisor sees `alive` turn False and ends the server
        finally:
            for socket in (self._front, self._back, self._control_in):
                socket.close(linger=0)

    def _drain(self, socket: zmq.Socket[bytes], handle: Any) -> None:
        for _ in range(_BURST):
            try:
                identity, *frames = socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            handle(identity.bytes, frames)

    def _tick(self, now_s: float) -> None:
        for job in self._ledger.expire(now_s):
            self._refuse(job.client, job.request.request_id, "deadline", f"no answer in {job.request.deadline_s:.0f} s")
        for identity in self._ledger.silent(now_s, WORKER_TIMEOUT_S):
            self._lose(identity, f"silent for {WORKER_TIMEOUT_S:.0f} s")

    def _dispatch(self) -> None:
        now_s = time.monotonic()
        for identity, job in self._ledger.assign():
            remaining_s = max(0.0, job.deadline_s - now_s)
            header = to_worker.encode(
                Assignment(job_id=job.job_id, waited_s=now_s - job.arrived_s, remaining_s=remaining_s)
            )
            # A worker that cannot be reached is found by its silence, which also requeues this job.
            self._send(self._back, identity, [header, *job.payload])

    # Clients

    def _on_client(self, client: bytes, frames: list[zmq.Frame]) -> None:
        request_id = NO_REQUEST
        try:
            if not frames:
                raise ProtocolError("empty message")
            message = requests.decode(frames[0].buffer)
            if isinstance(message, Ping):
                n_workers = len(self._ledger.workers)
                self._reply(client, Pong(epoch=self._epoch, n_workers=n_workers, n_queued=self._ledger.n_queued))
                return
            request_id = message.request_id
            if isinstance(message, InfoRequest):
                self._reply(client, self._info(request_id))
            else:
                self._submit(client, message, frames)
        except ProtocolError as error:
            self._refuse(client, request_id, "damaged", str(error))

    def _submit(self, client: bytes, request: ScoreRequest, frames: list[zmq.Frame]) -> None:
        if len(frames) != 2 or len(frames[1]) != 4 * request.total_length:
            raise ProtocolError(f"expected one frame of {request.total_length} token ids")
        n_bytes = len(frames[0]) + len(frames[1])
        if self._ledger.submit(client, request, list(frames), n_bytes, time.monotonic()) == "full":
            text = f"{self._ledger.n_queued} requests ({self._ledger.queued_bytes} bytes) are waiting"
            self._refuse(client, request.request_id, "busy", text, retry_after_s=0.2)

    def _info(self, request_id: bytes) -> ServerMessage:
        hello = next((worker.hello for worker in self._ledger.workers.values()), None)
        if hello is None:
            text = "no worker has loaded the model yet"
            return ErrorReply(request_id=request_id, code="busy", text=text, retry_after_s=0.5)
        return InfoReply(
            request_id=request_id,
            protocol_version=PROTOCOL_VERSION,
            model_name=hello.model_name,
            model_path=hello.model_path,
            model_fingerprint=hello.model_fingerprint,
            tokenizer_fingerprint=hello.tokenizer_fingerprint,
            vocab_size=hello.vocab_size,
            max_tokens=hello.max_tokens,
            n_workers=len(self._ledger.workers),
            engine=hello.engine,
            device=hello.device,
        )

    def _refuse(
        self, client: bytes, request_id: bytes, code: ErrorCode, text: str, *, retry_after_s: float = 0.0
    ) -> None:
        self._reply(client, ErrorReply(request_id=request_id, code=code, text=text, retry_after_s=retry_after_s))

    def _reply(self, client: bytes, message: ServerMessage) -> None:
        self._send(self._front, client, [replies.encode(message)])

    # Workers

    def _on_worker(self, identity: bytes, frames: list[zmq.Frame]) -> None:
        try:
            if not frames:
                raise ProtocolError("empty message")
            message = from_worker.decode(frames[0].buffer)
        except ProtocolError as error:
            log.error("dropped a message from worker %s: %s", identity.hex(), error)
            return
        if isinstance(message, Done):
            job = self._ledger.complete(identity, message.job_id)
            if job is not None:
                self._send(self._front, job.client, frames[1:])
            return
        self._welcome(identity, message)

    def _welcome(self, identity: bytes, hello: WorkerHello) -> None:
        others = [worker.hello for key, worker in self._ledger.workers.items() if key != identity]
        if others and others[0].model_fingerprint != hello.model_fingerprint:
            text = f"its model {hello.model_fingerprint} is not the {others[0].model_fingerprint} served here"
            self.events.put(WorkerEvent("refused", hello.name, text))
        elif self._ledger.hello(identity, hello, time.monotonic()):
            self.events.put(WorkerEvent("ready", hello.name, ""))

    def _lose_named(self, name: str) -> None:
        for identity in [key for key, worker in self._ledger.workers.items() if worker.hello.name == name]:
            self._lose(identity, "process ended")

    def _lose(self, identity: bytes, why: str) -> None:
        worker = self._ledger.workers[identity]
        log.warning("lost %s (%s); %d requests go elsewhere", worker.hello.name, why, len(worker.outstanding))
        for job in self._ledger.lose(identity):
            text = f"{job.attempts} workers were lost while they held this request; the last one: {why}"
            self._refuse(job.client, job.request.request_id, "worker_lost", text)

    def _send(self, socket: zmq.Socket[bytes], identity: bytes, frames: Sequence[Any]) -> None:
        try:
            socket.send_multipart([identity, *frames], zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            # EHOSTUNREACH: gone. EAGAIN: does not read. Either asks again by itself if it still lives.
            log.warning("could not send to %s: %s", identity.hex(), error.strerror)
