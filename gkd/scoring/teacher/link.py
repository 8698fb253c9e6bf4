"""Connection of the client to the server: one DEALER socket, heartbeats, and detection of lost messages.

Reports connection events; `gkd.scoring.teacher.exchange` decides what to resend. Not thread-safe, except for `wake`.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import zmq
from zmq.utils.monitor import recv_monitor_message

from gkd.errors import ConfigError, TeacherUnavailable
from gkd.scoring.teacher.outage import OutageClock
from teacher_server.wire.protocol import (
    ID_BYTES,
    Buffer,
    Ping,
    Pong,
    ProtocolError,
    ServerMessage,
    replies,
    requests,
)
from teacher_server.wire.sockets import set_common_options

if TYPE_CHECKING:
    from teacher_server.wire.keys import PeerKeys

POLL_S = 0.1  # maximum delay of a resend or of the detection of an outage
_PING_S = 0.5  # more often if the outage budget is short
_SUSPICIOUS_PINGS = 2.5  # after a silence of this many ping intervals, messages may be lost
_REOPEN_S = 0.5  # delay after a disconnect that ZMQ does not repair
_BURST = 64  # messages read per `listen`
_GOODBYE_MS = 200  # limit of the wait for the last cancellations to be sent

_EVENTS = (
    zmq.EVENT_CONNECTED
    | zmq.EVENT_CONNECT_DELAYED
    | zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)

Message = tuple[ServerMessage, list[Buffer]]


class LinkEvents(NamedTuple):
    """Result of one `listen`."""

    messages: list[Message]  # without heartbeats
    connected: bool  # a connection was established: requests that could not be sent can be now
    lost: bool  # the connection or the server is a new one: messages in transit are lost
    doubtful: bool  # messages may be lost: a silence ended, or a message was unreadable


class TeacherLink:
    """One connection, reestablished whenever it breaks.

    Args:
        keys: encrypt and authenticate the server; None disables encryption.

    Raises:
        ConfigError: the address is invalid.
    """

    def __init__(self, server_ip: str, server_port: int, clock: OutageClock, keys: PeerKeys | None) -> None:
        self.address = f"tcp://{server_ip}:{server_port}"
        self.clock = clock
        self.connected = False
        self.trouble = ""  # last error reply or unreadable message, for the error text
        self.n_unreadable = 0
        self.n_server_restarts = 0
        self.n_workers = self.n_queued = 0  # the server's numbers in its last heartbeat
        self._server_ip, self._server_port, self._keys = server_ip, server_port, keys
        self._refused = ""  # reason of the last failed handshake
        self._n_connections = 0  # established since the start
        self._gone_s: float | None = None  # time of a disconnect after which ZMQ does not reconnect
        self._epoch = b""
        self._pong_on_this_connection = False
        self._next_ping_s = 0.0
        self._ping_s = min(_PING_S, clock.outage_budget_s / 4)
        # After a server restart an automatic identity may be reused for another client, which would get our replies.
        self._identity = b"c" + os.urandom(ID_BYTES - 1)
        self._context = zmq.Context()
        self._waker, self._wakened = socket.socketpair()
        self._waker.setblocking(False)
        self._wakened.setblocking(False)
        try:
            self._open()
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(
                "teacher.server_ip", server_ip, str(error), "use a host name or an IPv4 address."
            ) from error

    def _open(self) -> None:
        self._socket = self._context.socket(zmq.DEALER)
        set_common_options(self._socket)
        self._socket.setsockopt(zmq.IDENTITY, self._identity)
        # Send only while connected: otherwise resends would accumulate in the socket.
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 100)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        # Detect an unreachable peer within seconds; TCP alone takes minutes.
        self._socket.setsockopt(zmq.CONNECT_TIMEOUT, 2000)
        self._socket.setsockopt(zmq.RCVHWM, 0)  # both directions are bounded by the caller's window
        self._socket.setsockopt(zmq.SNDHWM, 0)
        if self._keys is not None:
            from teacher_server.wire.keys import secure_peer

            secure_peer(self._socket, self._keys)
        self._monitor = self._socket.get_monitor_socket(_EVENTS)
        self._poller = zmq.Poller()
        for source in (self._socket, self._monitor, self._wakened):
            self._poller.register(source, zmq.POLLIN)
        self._socket.connect(self.address)

    def close(self) -> None:
        """Close; waits at most 0.2 s for queued messages, and only while connected. Idempotent."""
        self._context.destroy(linger=_GOODBYE_MS if self.connected else 0)
        self.connected = False
        self._waker.close()
        self._wakened.close()

    def wake(self) -> None:
        """Interrupt the current `listen`. Thread-safe; no-op after `close`."""
        with contextlib.suppress(OSError):  # full: the reader will wake anyway; closed: nothing to wake
            self._waker.send(b"\0")

    def begin(self) -> None:
        """Start the budgets and send a heartbeat: a first request is pending."""
        self.clock.restart()
        self._next_ping_s = self.clock.now_s

    def send(self, frames: Sequence[Buffer]) -> bool:
        """Send without copying the buffers; return False if there is no connection."""
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return False
        return True

    def listen(self, timeout_s: float | None) -> LinkEvents:
        """Wait for at most `timeout_s` and return what happened; None waits without limit and without heartbeats."""
        if timeout_s is not None and self.clock.now_s >= self._next_ping_s:
            self._ping()
        ready = dict(self._poller.poll(None if timeout_s is None else math.ceil(timeout_s * 1000)))
        self.clock.tick()
        if self._wakened.fileno() in ready:
            self._wakened.recv(4096)
        n_connections = self._n_connections
        if self._monitor in ready:
            self._watch_connection()
        connected = self._n_connections > n_connections
        lost = connected and self._n_connections > 1
        if self._gone_s is not None and self.clock.now_s - self._gone_s > _REOPEN_S:
            self._reopen()
        elif self._socket in ready:
            messages, restarted, doubtful = self._read()
            return LinkEvents(messages, connected, lost or restarted, doubtful)
        return LinkEvents([], connected, lost, False)

    def _ping(self) -> None:
        self.send([requests.encode(Ping())])
        self._next_ping_s = self.clock.now_s + self._ping_s

    def _read(self) -> tuple[list[Message], bool, bool]:
        """Return (messages, the server restarted, messages may be lost)."""
        messages: list[Message] = []
        restarted, unreadable = False, self.n_unreadable
        silence_ended = False
        for _ in range(_BURST):
            try:
                head, *frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                break
            try:
                header = replies.decode(head.buffer)
            except ProtocolError as error:
                self.n_unreadable += 1
                self.trouble = str(error)
                continue
            silence_ended = silence_ended or self.clock.silent_s > _SUSPICIOUS_PINGS * self._ping_s
            self.clock.heard()
            if isinstance(header, Pong):
                restarted = self._note_epoch(header) or restarted
                self.n_workers, self.n_queued = header.n_workers, header.n_queued
            else:
                messages.append((header, [frame.buffer for frame in frames]))
        return messages, restarted, silence_ended or self.n_unreadable > unreadable

    def _note_epoch(self, pong: Pong) -> bool:
        """Return whether the server restarted behind the same connection, as behind a proxy."""
        first, self._pong_on_this_connection = not self._pong_on_this_connection, True
        changed = self._epoch not in (b"", pong.epoch)
        self.n_server_restarts += changed
        self._epoch = pong.epoch
        return changed and not first

    # Connection

    def _watch_connection(self) -> None:
        """Process ZMQ's connection events."""
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.connected, self._n_connections = True, self._n_connections + 1
                self._pong_on_this_connection = False
                self._refused, self._gone_s = "", None
                self._ping()  # first message, so that a new epoch is known before a new server's replies
            elif event == zmq.EVENT_DISCONNECTED:
                self.connected, self._gone_s = False, self.clock.now_s
            elif event & (zmq.EVENT_CONNECTED | zmq.EVENT_CONNECT_DELAYED | zmq.EVENT_CONNECT_RETRIED):
                self._gone_s = None
            else:
                self._refused = self._explain_refusal(event)

    def _reopen(self) -> None:
        """Open a new socket: ZMQ does not reconnect after a refused key, an oversize frame or an invalid ZMTP byte."""
        self._gone_s, self.connected = None, False
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)
        self._open()

    def _explain_refusal(self, event: int) -> str:
        if self._keys is None:
            return "the server requires a key (set teacher.keys), or another service uses this port"
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            return "the server refuses the key in teacher.keys; check the server's allow-list"
        return "the server's key differs from server.key in teacher.keys, or the server uses no keys"

    def unavailable(self, pending: str) -> TeacherUnavailable | None:
        """Return the error if a budget is exceeded, else None.

        Args:
            pending: what the caller waits for, for the message: ``12 sequences``.
        """
        problem = self.clock.problem()
        if not problem:
            return None
        last = f"{self.clock.silent_s:.1f} s ago" if self.clock.ever_heard else "never"
        refused = f" Handshake failed: {self._refused}." if self._refused else ""
        trouble = f" Last error: {self.trouble}." if self.trouble else ""
        fix = server_command(self._server_ip, self._server_port)
        if self._refused:  # a server is there
            fix = "set teacher.keys to the bundle that its keygen made, or leave it empty if the server has no --keys"
        told = f"{problem} (last message: {last}); pending: {pending}.{refused}{trouble} Fix: {fix}"
        return TeacherUnavailable(f"teacher {self.address}: {told}")


def server_command(host: str, port: int) -> str:
    """Return the command of a server at an address, as the user typed that of the trainer: gkd, or launch/*.sh."""
    typed = os.environ.get("GKD_COMMAND", "")
    command = re.sub(r"\btrain(?=(\.sh)?'?$)", "teacher", typed)
    return f"{command if command != typed else 'gkd teacher'} --model PATH --host {host} --port {port}"
