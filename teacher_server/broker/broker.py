"""The broker: one thread between clients and workers, which owns every socket of the server.

    clients  DEALER --tcp--> ROUTER front | ledger | ROUTER back <--ipc-- DEALER  workers this server started
                                                   | ROUTER join <--tcp-- DEALER  workers of other hosts

`ClientHandler` says what to do with a client's message, `WorkerRegistry` with a worker's, `RequestQueue` who does what
next. Replies are checked and then forwarded as they came, without a copy. All sides bring explicit
random identities: automatic ones repeat after a restart, and then a reply can reach the wrong
requester. There is no message the broker waits for, so none whose loss could wedge it.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping

import zmq

from teacher_server.broker.client_handler import ClientHandler
from teacher_server.broker.metrics import BrokerMetrics
from teacher_server.broker.outbox import Outbox
from teacher_server.broker.request_queue import RequestQueue
from teacher_server.broker.status_board import StatusBoard
from teacher_server.broker.teachers import Teachers
from teacher_server.broker.worker_registry import WorkerEvent, WorkerRegistry
from teacher_server.wire.keys import Authenticator, ServerKeys, secure_server
from teacher_server.wire.protocol import ID_BYTES
from teacher_server.wire.sockets import CLIENT_BACKLOG, bind, make_router
from teacher_server.wire.status import ServerStatus
from teacher_server.wire.worker_protocol import Assignment

log = logging.getLogger(__name__)

_TICK_S = 0.1  # how late a deadline or a lost worker may be noticed
_RELOAD_S = 1.0  # how late a new key is let in
_BURST = 64  # messages read from one socket before the others get their turn
_DRAIN_LINGER_S = 5.0  # for the last replies of a drained server to leave
_DRAIN, _STOP = b"\0drain", b"\0stop"  # on the control socket, beside the names of dead workers


class Broker:
    """Runs in its own thread from `start` to `stop`; binding happens in the constructor.

    Args:
        host, port: where clients connect; port 0 picks a free one, see `port`.
        local_endpoint: ZMQ endpoint of the workers this server starts; whoever can open it is one.
        worker_port: where workers of other hosts connect, 0 for a free one; None: nowhere.
        max_queue_bytes: bound on requests that wait for a worker.
        worker_timeout_s: a worker silent for this long is lost.
        keys: who may connect to `port` and `worker_port`; None: everyone.
        teachers: name -> model fingerprint ("" if unknown) of all teachers, so that requests may wait for their
            workers, and no worker of another model joins; empty: any may join.

    Raises:
        ServerError: an address cannot be bound.
    """

    def __init__(
        self,
        host: str,
        port: int,
        local_endpoint: str,
        *,
        worker_port: int | None = None,
        max_queue_bytes: int = 256 << 20,
        worker_timeout_s: float = 3.0,
        keys: ServerKeys | None = None,
        metrics: BrokerMetrics | None = None,
        teachers: Mapping[str, str] | None = None,
    ) -> None:
        epoch = os.urandom(ID_BYTES)
        self.worker_port: int | None = None
        self._worker_timeout_s, self._drained = worker_timeout_s, False
        self._context = zmq.Context()
        with contextlib.ExitStack() as stack:
            stack.callback(self._context.destroy, linger=0)
            self._authenticator = None if keys is None else Authenticator(self._context, keys)
            if self._authenticator is not None:
                self._authenticator.start()
                stack.callback(self._authenticator.stop)
            # What is under way to a worker is bounded by its credit; a limit in messages could only lose some of it.
            self._front, back = (
                make_router(self._context, backlog=CLIENT_BACKLOG),
                make_router(self._context, backlog=0),
            )
            self._backs = [back]
            if keys is not None:
                secure_server(self._front, keys, "clients")
            self.port = bind(self._front, f"tcp://{host}:{port}", "--port")
            bind(back, local_endpoint, "TMPDIR")
            if worker_port is not None:
                join = make_router(self._context, backlog=0)
                if keys is not None:
                    secure_server(join, keys, "workers")
                self.worker_port = bind(join, f"tcp://{host}:{worker_port}", "--worker-port")
                self._backs.append(join)
            control = f"inproc://control-{epoch.hex()}"
            self._control_in = self._context.socket(zmq.PAIR)
            self._control_in.bind(control)
            self._control_out = self._context.socket(zmq.PAIR)
            self._control_out.connect(control)
            self._cleanup = stack.pop_all()
        self._control_lock = threading.Lock()
        self._ledger, known = RequestQueue(epoch[:8], max_queue_bytes), Teachers(teachers or {})
        self._board = StatusBoard(epoch, self._ledger, known)
        self._post = Outbox(self._front, self._board, metrics)
        self._crew = WorkerRegistry(self._ledger, known, self._board, self._post, metrics)
        self._desk = ClientHandler(epoch, self._ledger, known, self._board, self._post, self._crew)
        self._thread = threading.Thread(target=self._run, name="broker", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def events(self) -> queue.SimpleQueue[WorkerEvent]:
        """News for the supervisor."""
        return self._crew.events

    @property
    def alive(self) -> bool:
        """False once the thread has ended, by `stop` or by a bug (which is in the log)."""
        return self._thread.is_alive()

    def worker_died(self, name: str) -> None:
        """Tell it that the local worker process `name` has ended."""
        self._control(name.encode())

    def drain(self) -> None:
        """Take no new requests; a `drained` event says that the last one is answered."""
        self._control(_DRAIN)

    def snapshot(self) -> ServerStatus:
        """The latest status, at most half a second old; from any thread."""
        return self._board.latest

    def stop(self) -> None:
        """Stop and close every socket; bounded. Requests that are not answered yet are dropped."""
        self._control(_STOP)
        if self._thread.ident is not None:
            self._thread.join(timeout=2.0)
        with self._control_lock:
            self._control_out.close(linger=0)
        self._cleanup.close()

    def _control(self, message: bytes) -> None:
        # A thread that has died reads no more, and must not keep the one that ends the server.
        with self._control_lock, contextlib.suppress(zmq.Again):
            if not self._control_out.closed:
                self._control_out.send(message, zmq.NOBLOCK)

    # The loop

    def _run(self) -> None:
        try:
            poller = zmq.Poller()
            for socket in (*self._backs, self._front, self._control_in):
                poller.register(socket, zmq.POLLIN)
            next_tick_s = next_reload_s = 0.0
            while True:
                ready = dict(poller.poll(int(_TICK_S * 1000)))
                if self._control_in in ready and not self._obey(self._control_in.recv()):
                    return
                for back in self._backs:
                    if back in ready:
                        own = back is self._backs[0]
                        self._read(back, functools.partial(self._crew.on_message, back, own=own))
                if self._front in ready:
                    self._read(self._front, self._desk.on_message)
                now_s = time.monotonic()
                if now_s >= next_tick_s:
                    self._tick(now_s)
                    next_tick_s = now_s + _TICK_S
                if now_s >= next_reload_s and self._authenticator is not None:
                    self._authenticator.maybe_reload()
                    next_reload_s = now_s + _RELOAD_S
                self._dispatch()
        except Exception:
            log.exception("broker stopped by a bug")  # the supervisor sees `alive` turn False and ends the server
        finally:
            self._front.close(linger=int(_DRAIN_LINGER_S * 1000) if self._board.draining else 0)
            for socket in (*self._backs, self._control_in):
                socket.close(linger=0)

    def _obey(self, command: bytes) -> bool:
        if command == _DRAIN:
            self._board.draining = True
        elif command != _STOP:
            self._crew.lose_named(command.decode(), "its process ended")
        return command != _STOP

    def _read(self, socket: zmq.Socket[bytes], handle: Callable[[bytes, list[zmq.Frame]], None]) -> None:
        for _ in range(_BURST):
            try:
                identity, *frames = socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            handle(identity.bytes, frames)

    def _tick(self, now_s: float) -> None:
        for job in self._ledger.expire(now_s):
            self._post.refuse_job(job, "deadline", f"no answer in {job.request.deadline_s:.0f} s")
            self._desk.tell_cancelled(job)
        for identity in self._ledger.silent(now_s, self._worker_timeout_s):
            self._crew.lose(identity, f"silent for {self._worker_timeout_s:g} s")
        self._crew.dismiss_leavers()
        self._board.tick(now_s)
        if self._board.draining and not self._drained and not self._ledger.n_jobs:
            self._drained = True
            self.events.put(WorkerEvent("drained", "", ""))

    def _dispatch(self) -> None:
        now_s = time.monotonic()
        for identity, job in self._ledger.assign():
            remaining_s = max(0.0, job.deadline_s - now_s)
            waited_s = now_s - job.arrived_s
            header = Assignment(job_id=job.job_id, stream_id=job.stream_id, waited_s=waited_s, remaining_s=remaining_s)
            self._post.to_worker(identity, header, job.payload)
