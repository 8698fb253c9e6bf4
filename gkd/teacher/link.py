"""The client's line to the server: one DEALER, a heartbeat, and the news of what may have been lost on it.

Knows nothing of sequences: `exchange` decides what to send again, this says who is there. One thread
uses it; only `wake` is for the others.
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

from gkd.errors import ConfigError, TeacherUnavailable
from gkd.teacher.outage import OutageClock
from teacher_server.wire.protocol import (
    ID_BYTES,
    MAX_FRAME_BYTES,
    Buffer,
    Ping,
    Pong,
    ProtocolError,
    ServerMessage,
    replies,
    requests,
)

if TYPE_CHECKING:
    from teacher_server.wire.keys import PeerKeys

POLL_S = 0.1  # how late a resend or the end of a budget may be noticed
_PING_S = 0.5  # more often if the outage budget is short
_SUSPICIOUS_PINGS = 2.5  # a silence that ends after so many may have swallowed something
_REOPEN_S = 0.5  # after a break that ZMQ does not repair by itself
_BURST = 64  # messages read before the caller gets its turn to send
_GOODBYE_MS = 200  # for the last cancellations to leave

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

Arrival = tuple[ServerMessage, list[Buffer]]


class News(NamedTuple):
    """What one turn brought."""

    messages: list[Arrival]  # heartbeats are kept back
    connected: bool  # a connection was made: what could not be sent now can
    lost: bool  # the connection or the server is a new one: what is under way on the old one never arrives
    doubtful: bool  # something may have been lost: a silence ended, or a message could not be read


class TeacherLink:
    """One connection, made again whenever it breaks.

    Args:
        keys: encrypt, and talk to this server only; None: no encryption.

    Raises:
        ConfigError: the address cannot be one.
    """

    def __init__(self, server_ip: str, server_port: int, clock: OutageClock, keys: PeerKeys | None) -> None:
        self.address = f"tcp://{server_ip}:{server_port}"
        self.clock = clock
        self.connected = False
        self.trouble = ""  # the last message of no use, for the error text
        self.n_unreadable = 0
        self.n_server_restarts = 0
        self._server_ip, self._server_port, self._keys = server_ip, server_port, keys
        self._refused = ""  # why the last handshake failed
        self._n_connections = 0  # made since the start
        self._gone_s: float | None = None  # since when there is no connection and nobody makes one
        self._epoch = b""
        self._pong_on_this_connection = False
        self._next_ping_s = 0.0
        self._ping_s = min(_PING_S, clock.outage_budget_s / 4)
        # An automatic identity may be given to another client after a server restart, and our replies with it.
        self._identity = b"c" + os.urandom(ID_BYTES - 1)
        self._context = zmq.Context()
        self._waker, self._wakened = socket.socketpair()
        self._waker.setblocking(False)
        self._wakened.setblocking(False)
        try:
            self._open()
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError("teacher.server_ip", server_ip, str(error), "name a host or an IPv4 address.") from error

    def _open(self) -> None:
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, self._identity)
        # Send only to a live connection: while there is none, resends would pile up in the socket.
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 100)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        # A peer that vanished behind a dead route says nothing: these notice it in seconds, TCP alone in minutes.
        self._socket.setsockopt(zmq.CONNECT_TIMEOUT, 2000)
        self._socket.setsockopt(zmq.HANDSHAKE_IVL, 5000)
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, 500)
        self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 2000)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self._socket.setsockopt(zmq.RCVHWM, 0)  # bounded by the caller's window, so is the other
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
        """Close; waits at most 0.2 s, and only for what a live connection still takes. May be called twice."""
        self._context.destroy(linger=_GOODBYE_MS if self.connected else 0)
        self.connected = False
        self._waker.close()
        self._wakened.close()

    def wake(self) -> None:
        """End the current `listen`. From any thread; after `close` it does nothing."""
        with contextlib.suppress(OSError):  # full: it will wake anyway; closed: nobody is there to be woken
            self._waker.send(b"\0")

    def begin(self) -> None:
        """Somebody begins to wait for something: the budgets start now."""
        self.clock.restart()
        self._next_ping_s = self.clock.now_s

    def send(self, frames: Sequence[Buffer]) -> bool:
        """False if there is no connection at the moment. The buffers are not copied."""
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return False
        return True

    def listen(self, timeout_s: float | None) -> News:
        """What has arrived, after at most `timeout_s`; None: sleep until something happens, without heartbeats."""
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
            return News(messages, connected, lost or restarted, doubtful)
        return News([], connected, lost, False)

    def _ping(self) -> None:
        self.send([requests.encode(Ping())])
        self._next_ping_s = self.clock.now_s + self._ping_s

    def _read(self) -> tuple[list[Arrival], bool, bool]:
        """(messages, the server is a new one, something may be lost)"""
        arrived: list[Arrival] = []
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
            else:
                arrived.append((header, [frame.buffer for frame in frames]))
        return arrived, restarted, silence_ended or self.n_unreadable > unreadable

    def _note_epoch(self, pong: Pong) -> bool:
        """True if the server is a new one behind an old connection; a new connection is news of its own."""
        first, self._pong_on_this_connection = not self._pong_on_this_connection, True
        changed = self._epoch not in (b"", pong.epoch)
        self.n_server_restarts += changed
        self._epoch = pong.epoch
        return changed and not first

    # The connection

    def _watch_connection(self) -> None:
        """Read what ZMQ says of the connection."""
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.connected, self._n_connections = True, self._n_connections + 1
                self._pong_on_this_connection = False
                self._refused, self._gone_s = "", None
                self._ping()  # first of all, so that a new epoch is known before a new server's answers
            elif event == zmq.EVENT_DISCONNECTED:
                self.connected, self._gone_s = False, self.clock.now_s
            elif event & (zmq.EVENT_CONNECTED | zmq.EVENT_CONNECT_DELAYED | zmq.EVENT_CONNECT_RETRIED):
                self._gone_s = None
            else:
                self._refused = self._explain_refusal(event)

    def _reopen(self) -> None:
        """ZMQ never connects again after a refused key, an oversize frame or a byte that is not ZMTP."""
        self._gone_s, self.connected = None, False
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)
        self._open()

    def _explain_refusal(self, event: int) -> str:
        if self._keys is None:
            return "the server wants a key (set teacher.keys), or another service is on this port"
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            return "the server refuses the key in teacher.keys: is it in the server's allow-list?"
        return "the server is not the one of server.key in teacher.keys, or uses no keys"

    def unavailable(self, what: str) -> TeacherUnavailable | None:
        """The error to give up with, or None while the budgets last.

        Args:
            what: what is waited for, e.g. ``12 requests are``.
        """
        problem = self.clock.problem()
        if not problem:
            return None
        last = f"{self.clock.silent_s:.1f} s ago" if self.clock.ever_heard else "never"
        refused = f" Its handshake fails: {self._refused}." if self._refused else ""
        trouble = f" Last trouble: {self.trouble}." if self.trouble else ""
        return TeacherUnavailable(
            f"teacher {self.address}: {problem} (last heard: {last}), {what} waited for.{refused}{trouble} Start one "
            f"with: python -m teacher_server --model PATH --host {self._server_ip} --port {self._server_port}"
        )
