"""Connection of a worker to the broker, in its own thread, so that heartbeats continue during a forward pass.

    broker <--DEALER--> link thread --inbox (queue)--> compute thread
                                    <--outbox (queue)---

Every connection uses a new identity. When a connection breaks, the messages in flight are unknown, so the
worker drops its requests and the broker assigns them again. Otherwise a lost assignment or a lost reply
would wait for its deadline.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import zmq
from zmq.utils.monitor import recv_monitor_message

from teacher_server.wire.keys import PeerKeys, secure_peer
from teacher_server.wire.protocol import ID_BYTES, ProtocolError
from teacher_server.wire.sockets import set_common_options
from teacher_server.wire.worker_protocol import (
    Assignment,
    Dismiss,
    Done,
    JobCancel,
    JobReceived,
    Part,
    WorkerHello,
    from_worker,
    to_worker,
)

log = logging.getLogger(__name__)

HEARTBEAT_S = 0.5
_BURST = 64  # messages read from one socket before the other sockets are read
_TICK_S = 0.05  # largest delay of a hello, of leaving, and until a hung batch is detected
_RECONNECT_MS = 100
_RECONNECT_MAX_MS = 1000
_LOG_AFTER = 3  # consecutive failed handshakes before the log names possible causes
_WATCHED = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_AUTH


class Work(NamedTuple):
    job: Assignment
    frames: list[zmq.Frame]  # [request header, token frame, given ids...], or only the header


class NewConnection(NamedTuple):
    """The connection was replaced. The broker has reassigned all earlier jobs."""


class End(NamedTuple):
    """The link has ended, and the worker exits. `reason` is empty after a drain."""

    reason: str


MakeFrames = Callable[[], Sequence[Any]]
Event = Work | JobReceived | JobCancel | NewConnection | End


class WorkerLink:
    """Connect, send hellos, and reconnect while the broker is away. `inbox` holds events for the compute thread.

    Args:
        compute_timeout_s: a batch that takes longer is hung; the process exits, and its supervisor restarts it.
    """

    def __init__(
        self, endpoint: str, hello: WorkerHello, *, keys: PeerKeys | None = None, compute_timeout_s: float = 600.0
    ) -> None:
        self.inbox: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._endpoint = endpoint
        self._hello = hello
        self._keys = keys
        self._compute_timeout_s = compute_timeout_s
        self._busy_since_s: float | None = None
        self._leaving = self._connected = self._closing = False
        self._n_failed = 0  # consecutive failed handshakes
        self._next_hello_s = 0.0
        hello.nonce = os.urandom(8)
        self._context = zmq.Context()
        self._outbox: queue.SimpleQueue[tuple[bytes, MakeFrames]] = queue.SimpleQueue()
        outbox = f"inproc://outbox-{os.urandom(8).hex()}"  # its messages only wake the link thread
        self._outbox_out = self._context.socket(zmq.PULL)
        self._outbox_out.setsockopt(zmq.RCVHWM, 0)
        self._outbox_out.bind(outbox)
        self._outbox_in = self._context.socket(zmq.PUSH)
        self._outbox_in.setsockopt(zmq.SNDHWM, 0)
        self._outbox_in.connect(outbox)
        self._connect()
        self._thread = threading.Thread(target=self._run, name="link", daemon=True)
        self._thread.start()

    # Called by the compute thread

    def send_reply(self, job_id: bytes, make: MakeFrames, *, final: bool = True) -> None:
        """Send a reply [header, frames...] for the client of a job. Only the compute thread may call it.

        Args:
            make: returns the reply. The link thread calls it, so that the engine does not wait for the packing.
                The buffers are not copied: do not modify them afterwards.
        """
        message = Done(job_id=job_id) if final else Part(job_id=job_id)
        self._outbox.put((from_worker.encode(message), make))
        self._outbox_in.send(b"")

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """Apply `compute_timeout_s` to the block."""
        self._busy_since_s = time.monotonic()
        try:
            yield
        finally:
            self._busy_since_s = None

    def leave(self) -> None:
        """Request no more jobs, and end after the assigned ones. Can be called from a signal handler."""
        self._leaving = True

    def close(self) -> None:
        """Send the last replies within bounded time, and close the sockets."""
        self._closing = True
        self._thread.join(timeout=5.0)
        self._outbox_in.close(linger=0)
        self._context.destroy(linger=0)

    # Called by the link thread

    def _connect(self) -> None:
        self._dealer = self._context.socket(zmq.DEALER)
        set_common_options(self._dealer)
        self._dealer.setsockopt(zmq.IDENTITY, b"w" + os.urandom(ID_BYTES - 1))
        self._dealer.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        self._dealer.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)
        # The credit bounds what is in flight; a limit on messages could only drop some of them.
        self._dealer.setsockopt(zmq.SNDHWM, 0)
        self._dealer.setsockopt(zmq.RCVHWM, 0)
        if self._keys is not None:
            secure_peer(self._dealer, self._keys)
        self._monitor = self._dealer.get_monitor_socket(_WATCHED)
        self._dealer.connect(self._endpoint)
        self._poller = zmq.Poller()
        for socket in (self._dealer, self._outbox_out, self._monitor):
            self._poller.register(socket, zmq.POLLIN)
        self._next_hello_s = 0.0

    def _run(self) -> None:
        end = End("its link failed, see the log")
        try:
            end = self._serve()
            self._dealer.close(linger=1000)
        except Exception:
            log.exception("the link failed")
        finally:
            self.inbox.put(end)

    def _serve(self) -> End:
        while True:
            self._check_computing()
            now_s = time.monotonic()
            if self._closing or (self._leaving and not self._connected):
                return End("")  # without a connection the broker reassigns its jobs
            # Send only while connected: hellos queued during an outage would all be sent afterwards.
            if self._connected and (now_s >= self._next_hello_s or self._leaving != self._hello.leaving):
                self._hello.leaving = self._leaving
                self._dealer.send(from_worker.encode(self._hello))
                self._next_hello_s = now_s + HEARTBEAT_S
            ready = dict(self._poller.poll(int(_TICK_S * 1000)))
            if self._outbox_out in ready:
                for _ in _waiting(self._outbox_out):
                    message, make = self._outbox.get()
                    self._dealer.send_multipart([message, *make()], copy=False)
            if self._dealer in ready:
                for frames in _waiting(self._dealer):
                    if (end := self._receive(frames)) is not None:
                        return end
            if self._monitor in ready:
                end = self._on_connection(recv_monitor_message(self._monitor)["event"])
                if end is not None:
                    return end

    def _receive(self, frames: list[zmq.Frame]) -> End | None:
        try:
            message = to_worker.decode(frames[0].buffer)
        except ProtocolError as error:
            log.error("dropped a message of the broker: %s", error)
            return None
        if isinstance(message, Dismiss):
            return End(message.why)
        self.inbox.put(Work(message, frames[1:]) if isinstance(message, Assignment) else message)
        return None

    def _on_connection(self, event: int) -> End | None:
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            return End(f"the broker at {self._endpoint} does not allow this worker's key")
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            log.info("connected to %s", self._endpoint)
            self._connected = True
            self._n_failed = 0
            self._next_hello_s = 0.0
            return None
        if self._connected:
            log.warning("lost the connection to %s, reconnecting", self._endpoint)
        self._n_failed += not self._connected
        if self._n_failed == _LOG_AFTER:
            hint = "it has another server.key" if self._keys else "it may require --keys, or be another service"
            log.error("%s closes the connection during the handshake: %s; retrying", self._endpoint, hint)
        self._connected = False
        self._dealer.disable_monitor()
        self._monitor.close(linger=0)
        self._dealer.close(linger=0)
        time.sleep(min(_RECONNECT_MAX_MS, _RECONNECT_MS << min(self._n_failed, 8)) / 1000)
        self._connect()
        self.inbox.put(NewConnection())
        return None

    def _check_computing(self) -> None:
        since_s = self._busy_since_s
        if since_s is not None and time.monotonic() - since_s > self._compute_timeout_s:
            log.critical("a batch has taken more than %g s: ending this worker", self._compute_timeout_s)
            os._exit(3)  # the compute thread hangs, so a normal exit would wait for it


def _waiting(socket: zmq.Socket[bytes]) -> Iterator[list[zmq.Frame]]:
    """Yield the messages that have arrived, at most `_BURST`."""
    for _ in range(_BURST):
        try:
            yield socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return
