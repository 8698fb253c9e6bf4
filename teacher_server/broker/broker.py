"""Broker between clients and workers: one thread that owns every socket of the server.

    clients  DEALER --tcp--> ROUTER front | request queue | ROUTER back <--ipc-- DEALER  local workers
                                                          | ROUTER join <--tcp-- DEALER  workers of other hosts

`ClientHandler` processes the clients' messages, `WorkerRegistry` the workers' messages, and `RequestQueue` assigns
requests to workers. Replies are checked and forwarded without a copy. All peers set random identities: automatic
identities repeat after a restart, and then a reply could reach the wrong client. The broker never blocks on a
message, so a lost message cannot stall it.
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
from prometheus_client import CollectorRegistry

from teacher_server.broker.client_handler import ClientHandler
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

_TICK_S = 0.1  # largest delay until a deadline or a lost worker is detected
_RELOAD_S = 1.0  # largest delay until a new key is accepted
_BURST = 64  # messages read from one socket before the other sockets are read
_DRAIN_LINGER_S = 5.0  # time to send the last replies of a drained server
# Messages on the control socket, which also carries the names of dead workers.
_DRAIN = b"\0drain"
_STOP = b"\0stop"


class Broker:
    """The broker thread, from `start` to `stop`. The constructor binds the sockets.

    Args:
        host, port: address for clients; port 0 picks a free one, see `port`.
        local_endpoint: ZMQ endpoint for local workers; every process that can open it is accepted as a worker.
        worker_port: port for workers of other hosts, 0 for a free one; None opens no such port.
        max_queue_bytes: limit on the bytes of queued requests.
        worker_timeout_s: a worker that sends nothing for this long is lost.
        keys: keys accepted on `port` and `worker_port`; None disables authentication.
        registry: source of the metrics page; None serves no metrics.
        teachers: name -> model fingerprint ("" if unknown) of all teachers. Their requests are queued before a worker
            has joined, and workers with another model are refused. Empty means a worker of any teacher may join.

    Raises:
        ServerError: if an address cannot be bound.
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
        registry: CollectorRegistry | None = None,
        teachers: Mapping[str, str] | None = None,
    ) -> None:
        epoch = os.urandom(ID_BYTES)
        self.worker_port: int | None = None
        self._worker_timeout_s = worker_timeout_s
        self._drained = False
        self._context = zmq.Context()
        with contextlib.ExitStack() as stack:
            stack.callback(self._context.destroy, linger=0)
            self._authenticator = None if keys is None else Authenticator(self._context, keys)
            if self._authenticator is not None:
                self._authenticator.start()
                stack.callback(self._authenticator.stop)
            # A worker's credit bounds what is in flight to it; a limit on messages could only drop some of them.
            self._front = make_router(self._context, backlog=CLIENT_BACKLOG)
            back = make_router(self._context, backlog=0)
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
        self._queue = RequestQueue(epoch[:8], max_queue_bytes)
        registered = Teachers(teachers or {})
        self._board = StatusBoard(epoch, self._queue, registered, registry)
        self._outbox = Outbox(self._front, self._board)
        self._registry = WorkerRegistry(self._queue, registered, self._board, self._outbox)
        self._client_handler = ClientHandler(epoch, self._queue, registered, self._board, self._outbox, self._registry)
        self._thread = threading.Thread(target=self._run, name="broker", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def events(self) -> queue.SimpleQueue[WorkerEvent]:
        """Events for the supervisor."""
        return self._registry.events

    @property
    def alive(self) -> bool:
        """Return whether the thread runs. It ends by `stop` or by an exception, which is logged."""
        return self._thread.is_alive()

    def worker_died(self, name: str) -> None:
        """Report that the local worker process `name` has exited."""
        self._control(name.encode())

    def drain(self) -> None:
        """Refuse new requests. A `drained` event follows when the last request is completed."""
        self._control(_DRAIN)

    def snapshot(self) -> ServerStatus:
        """Return the latest status, at most half a second old. Any thread may call it."""
        return self._board.latest

    def stop(self) -> None:
        """Stop the thread and close every socket, within bounded time. Unfinished requests are dropped."""
        self._control(_STOP)
        if self._thread.ident is not None:
            self._thread.join(timeout=2.0)
        with self._control_lock:
            self._control_out.close(linger=0)
        self._cleanup.close()

    def _control(self, message: bytes) -> None:
        # A dead broker thread reads no message, and must not block the thread that ends the server.
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
                if self._control_in in ready and not self._on_control(self._control_in.recv()):
                    return
                for back in self._backs:
                    if back in ready:
                        is_local = back is self._backs[0]
                        self._read(back, functools.partial(self._registry.on_message, back, local=is_local))
                if self._front in ready:
                    self._read(self._front, self._client_handler.on_message)
                now_s = time.monotonic()
                if now_s >= next_tick_s:
                    self._tick(now_s)
                    next_tick_s = now_s + _TICK_S
                if now_s >= next_reload_s and self._authenticator is not None:
                    self._authenticator.maybe_reload()
                    next_reload_s = now_s + _RELOAD_S
                self._dispatch()
        except Exception:
            log.exception("the broker thread failed")  # `alive` turns False, and the supervisor ends the server
        finally:
            self._front.close(linger=int(_DRAIN_LINGER_S * 1000) if self._board.draining else 0)
            for socket in (*self._backs, self._control_in):
                socket.close(linger=0)

    def _on_control(self, command: bytes) -> bool:
        if command == _DRAIN:
            self._board.draining = True
        elif command != _STOP:
            self._registry.mark_lost_by_name(command.decode(), "its process exited")
        return command != _STOP

    def _read(self, socket: zmq.Socket[bytes], handle: Callable[[bytes, list[zmq.Frame]], None]) -> None:
        for _ in range(_BURST):
            try:
                identity, *frames = socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            handle(identity.bytes, frames)

    def _tick(self, now_s: float) -> None:
        for job in self._queue.expire(now_s):
            self._outbox.refuse_job(job, "deadline", f"not completed within {job.request.deadline_s:.0f} s")
            self._client_handler.notify_cancelled(job)
        for identity in self._queue.silent_workers(now_s, self._worker_timeout_s):
            self._registry.mark_lost(identity, f"silent for {self._worker_timeout_s:g} s")
        self._registry.dismiss_drained()
        self._board.tick(now_s)
        if self._board.draining and not self._drained and not self._queue.n_jobs:
            self._drained = True
            self.events.put(WorkerEvent("drained", "", ""))

    def _dispatch(self) -> None:
        now_s = time.monotonic()
        for identity, job in self._queue.assign():
            remaining_s = max(0.0, job.deadline_s - now_s)
            waited_s = now_s - job.arrived_s
            header = Assignment(job_id=job.job_id, stream_id=job.stream_id, waited_s=waited_s, remaining_s=remaining_s)
            self._outbox.to_worker(identity, header, job.payload)
