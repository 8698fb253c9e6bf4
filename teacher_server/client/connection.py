"""Connection of a client to a broker: one DEALER socket, heartbeats, and detection of lost messages.

Reports events; `teacher_server.client.client` decides what to send again. Not thread-safe, except for `wake`.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import zmq
from zmq.utils.monitor import recv_monitor_message

from teacher_server.client.outage import OutageClock
from teacher_server.errors import ServerError
from teacher_server.wire.protocol import ID_BYTES, Buffer, Ping, Pong, ProtocolError, ServerMessage, replies, requests
from teacher_server.wire.sockets import set_common_options

if TYPE_CHECKING:
    from teacher_server.wire.keys import PeerKeys

POLL_S = 0.1  # maximum delay of a resend or of the detection of an outage
_PING_S = 0.5  # more often if the outage budget is short
_SUSPICIOUS_PINGS = 2.5  # after a silence of this many ping intervals, messages may be lost
_REOPEN_S = 0.5  # delay after a disconnect that ZMQ does not repair
_BURST = 64  # messages read per `listen`
_GOODBYE_MS = 200  # limit of the wait for the last cancellations to be sent

_RECONNECTING = zmq.EVENT_CONNECTED | zmq.EVENT_CONNECT_DELAYED | zmq.EVENT_CONNECT_RETRIED
_HANDSHAKE_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
# CLOSED: an attempt to connect has failed, for example because the port is closed.
_EVENTS = _RECONNECTING | _HANDSHAKE_FAILED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED

Message = tuple[ServerMessage, list[Buffer]]  # a header and its frames


class Events(NamedTuple):
    """Result of one `listen`."""

    messages: list[Message]  # without heartbeats
    connected: bool  # a connection was established: requests that could not be sent can be now
    lost: bool  # the connection or the server is a new one: messages in transit are lost
    doubtful: bool  # messages may be lost: a silence ended, or a message was unreadable


class Connection:
    """One connection, reestablished whenever it breaks.

    Args:
        endpoint: tcp://HOST:PORT
        clock: its silence is that of the server.
        keys: encrypt and authenticate the server; None disables encryption.
        zmtp_heartbeats: close the connection to a server that is stopped or unreachable, to reconnect sooner.

    Raises:
        ServerError: the address is invalid.
    """

    def __init__(
        self, endpoint: str, clock: OutageClock, keys: PeerKeys | None, *, zmtp_heartbeats: bool = True
    ) -> None:
        self.endpoint = endpoint
        self.clock = clock
        self.has_keys = keys is not None
        self.is_open = False
        self.was_reached = False  # a TCP connection was established
        self.is_unreachable = False  # the first attempt to connect has failed
        self.n_broken = 0  # connections that broke after their handshake
        self.handshake_failure = 0  # ZMQ's event of the last handshake, if it failed
        self.trouble = ""  # last unreadable message, or what the caller notes, for errors
        self.n_unreadable = 0
        self.n_server_restarts = 0
        self.epoch = b""  # the server's process; empty before its first heartbeat
        self.n_workers = 0  # the server's number in its last heartbeat
        self.n_queued = 0  # likewise
        self._keys = keys
        self._zmtp_heartbeats = zmtp_heartbeats
        self._n_opened = 0  # connections established since the start
        self._gone_s: float | None = None  # time of a disconnect after which ZMQ does not reconnect
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
            raise ServerError(f"{endpoint.removeprefix('tcp://')}: {error.strerror}.") from error

    def _open(self) -> None:
        self._socket = self._context.socket(zmq.DEALER)
        set_common_options(self._socket)
        if not self._zmtp_heartbeats:
            self._socket.setsockopt(zmq.HEARTBEAT_IVL, 0)
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
        self._socket.connect(self.endpoint)

    def close(self) -> None:
        """Close; waits at most 0.2 s for queued messages, and only while connected. Idempotent."""
        self._context.destroy(linger=_GOODBYE_MS if self.is_open else 0)
        self.is_open = False
        self._waker.close()
        self._wakened.close()

    def wake(self) -> None:
        """Interrupt the current `listen`. Thread-safe; no-op after `close`."""
        with contextlib.suppress(OSError):  # full: the reader will wake anyway; closed: nothing to wake
            self._waker.send(b"\0")

    def ping_now(self) -> None:
        """Send a heartbeat with the next `listen`."""
        self._next_ping_s = self.clock.now_s

    def send(self, frames: Sequence[Buffer]) -> bool:
        """Send without copying the buffers; return False if there is no connection."""
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return False
        return True

    def listen(self, timeout_s: float | None) -> Events:
        """Wait for at most `timeout_s` and return what happened; None waits without limit and without heartbeats."""
        if timeout_s is not None and self.clock.now_s >= self._next_ping_s:
            self._ping()
        ready = dict(self._poller.poll(None if timeout_s is None else math.ceil(timeout_s * 1000)))
        self.clock.tick()
        if self._wakened.fileno() in ready:
            self._wakened.recv(4096)
        n_opened = self._n_opened
        if self._monitor in ready:
            self._watch_connection()
        connected = self._n_opened > n_opened
        lost = connected and self._n_opened > 1
        if self._gone_s is not None and self.clock.now_s - self._gone_s > _REOPEN_S:
            self._reopen()
        elif self._socket in ready:
            messages, restarted, doubtful = self._read()
            return Events(messages, connected, lost or restarted, doubtful)
        return Events([], connected, lost, False)

    def _ping(self) -> None:
        self.send([requests.encode(Ping())])
        self._next_ping_s = self.clock.now_s + self._ping_s

    def _read(self) -> tuple[list[Message], bool, bool]:
        """Return (messages, the server restarted, messages may be lost)."""
        messages: list[Message] = []
        n_unreadable = self.n_unreadable
        restarted = False
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
                self.n_workers = header.n_workers
                self.n_queued = header.n_queued
            else:
                messages.append((header, [frame.buffer for frame in frames]))
        return messages, restarted, silence_ended or self.n_unreadable > n_unreadable

    def _note_epoch(self, pong: Pong) -> bool:
        """Return whether the server restarted behind the same connection, as behind a proxy."""
        is_first = not self._pong_on_this_connection
        self._pong_on_this_connection = True
        changed = self.epoch not in (b"", pong.epoch)
        self.n_server_restarts += changed
        self.epoch = pong.epoch
        return changed and not is_first

    def _watch_connection(self) -> None:
        """Process ZMQ's connection events."""
        while self._monitor.poll(0):
            event = int(recv_monitor_message(self._monitor)["event"])
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.is_open = True
                self._n_opened += 1
                self._pong_on_this_connection = False
                self.handshake_failure = 0
                self._gone_s = None
                self._ping()  # first message, so that a new epoch is known before a new server's replies
            elif event == zmq.EVENT_DISCONNECTED:
                self.n_broken += self.is_open
                if not self.is_open:
                    self.handshake_failure = self.handshake_failure or event
                self.is_open = False
                self._gone_s = self.clock.now_s
            elif event == zmq.EVENT_CLOSED:
                self.is_unreachable = not self.was_reached
            elif event & _RECONNECTING:
                self.was_reached = self.was_reached or event == zmq.EVENT_CONNECTED
                self._gone_s = None
            else:
                self.handshake_failure = event

    def _reopen(self) -> None:
        """Open a new socket: ZMQ does not reconnect after a refused key, an oversize frame or an invalid ZMTP byte."""
        self._gone_s = None
        self.is_open = False
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)
        self._open()

    def refusal(self, keys_setting: str) -> str:
        """Return why the handshake failed, for errors; empty if it did not fail, or no cause is known.

        Args:
            keys_setting: the caller's name of the keys, e.g. ``teacher.keys``.
        """
        if not self.handshake_failure & _HANDSHAKE_FAILED:
            return ""
        if not self.has_keys:
            return f"the server requires a key (set {keys_setting}), or another service uses this port"
        if self.handshake_failure == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            return f"the server refuses the key in {keys_setting}; check the server's allow-list"
        return f"the server's key differs from server.key in {keys_setting}, or the server uses no keys"
