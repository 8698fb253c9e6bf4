"""The client's line to the server: one DEALER, a heartbeat, and the decision when to give up.

Knows nothing of sequences: `client` decides what to send again, this says who is there. It keeps
its own time, which stands still while nobody listens, so that a trainer busy with a step for a
minute does not take the silence for an outage.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import zmq

from gkd.errors import ConfigError, TeacherError, TeacherUnavailable
from teacher_server.protocol import (
    ID_BYTES,
    Buffer,
    ErrorReply,
    Ping,
    Pong,
    ProtocolError,
    ServerMessage,
    replies,
    requests,
)

_PING_S = 0.5
_POLL_S = 0.05  # how late a resend or the end of a budget may be noticed
_BURST = 64  # messages read before the caller gets its turn to send

Arrival = tuple[ServerMessage, list[Buffer]]


class TeacherLink:
    """One connection, which ZMQ makes again by itself whenever it breaks. One thread at a time may use it.

    Args:
        outage_budget_s: longest silence, heartbeats included.
        stall_budget_s: longest time without `progressed`, heartbeats or not.

    Raises:
        ConfigError: the address cannot be one.
    """

    def __init__(self, server_ip: str, server_port: int, *, outage_budget_s: float, stall_budget_s: float) -> None:
        self.address = f"tcp://{server_ip}:{server_port}"
        self.trouble = ""  # the last message of no use, for the error text
        self.n_unreadable = 0
        self.n_server_restarts = 0
        self._server_ip, self._server_port = server_ip, server_port
        self._outage_budget_s, self._stall_budget_s = outage_budget_s, stall_budget_s
        self._in_use = False
        self._paused_s = 0.0
        self._epoch = b""
        self._ever_heard = False
        self._heard_s = self._progress_s = self._next_ping_s = self.now_s()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        # An automatic identity may be given to another client after a server restart, and our replies with it.
        self._socket.setsockopt(zmq.IDENTITY, b"c" + os.urandom(ID_BYTES - 1))
        # Send only to a live connection: while there is none, resends would pile up in the socket.
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 100)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        self._socket.setsockopt(zmq.RCVHWM, 0)  # bounded by the caller's window
        try:
            self._socket.connect(self.address)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError("teacher.server_ip", server_ip, str(error), "name a host or an IPv4 address.") from error

    def close(self) -> None:
        """Close without waiting for the server; may be called twice."""
        self._context.destroy(linger=0)

    def now_s(self) -> float:
        """Monotonic time, less the pauses."""
        return time.monotonic() - self._paused_s

    def pause_since(self, monotonic_s: float) -> None:
        """Nobody listened since `monotonic_s`: let that time not count."""
        self._paused_s += time.monotonic() - monotonic_s

    def begin(self) -> None:
        """Open a conversation; its budgets start now. Raises TeacherError if another one is open."""
        if self._in_use:
            raise TeacherError(f"teacher {self.address}: finish or close the running score() before the next call")
        self._in_use = True
        self._heard_s = self._progress_s = self._next_ping_s = self.now_s()

    def end(self) -> None:
        self._in_use = False

    def send(self, frames: Sequence[Buffer]) -> bool:
        """False if there is no connection at the moment. The buffers are not copied."""
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return False
        return True

    def receive(self, what: str) -> list[Arrival]:
        """What has arrived, after at most one poll interval; heartbeats are kept back.

        Args:
            what: what the caller waits for, for the error text, e.g. ``12 sequences are``.

        Raises:
            TeacherUnavailable: a budget is spent.
        """
        if self.now_s() >= self._next_ping_s:
            self.send([requests.encode(Ping())])
            self._next_ping_s = self.now_s() + _PING_S
        arrived: list[Arrival] = []
        timeout_ms = int(_POLL_S * 1000)
        while len(arrived) < _BURST and self._socket.poll(timeout_ms):
            timeout_ms = 0
            head, *frames = [frame.buffer for frame in self._socket.recv_multipart(copy=False)]
            try:
                header = replies.decode(head)
            except ProtocolError as error:
                self.n_unreadable += 1
                self.trouble = str(error)
                continue
            self._heard_s, self._ever_heard = self.now_s(), True
            if isinstance(header, Pong):
                self.n_server_restarts += self._epoch not in (b"", header.epoch)
                self._epoch = header.epoch
            else:
                arrived.append((header, list(frames)))
        if all(isinstance(header, ErrorReply) for header, _ in arrived):  # a server may say `busy` for ever
            self._check_budgets(what)
        return arrived

    def progressed(self) -> None:
        """The caller got what it asked for."""
        self._progress_s = self.now_s()

    def _check_budgets(self, what: str) -> None:
        silent_s, stalled_s = self.now_s() - self._heard_s, self.now_s() - self._progress_s
        if silent_s > self._outage_budget_s:
            problem = f"nothing heard for {silent_s:.1f} s"
        elif stalled_s > self._stall_budget_s:
            problem = f"the server is alive but has answered nothing for {stalled_s:.1f} s"
        else:
            return
        last = f"{silent_s:.1f} s ago" if self._ever_heard else "never"
        trouble = f" Last trouble: {self.trouble}." if self.trouble else ""
        remote = "" if self._server_ip.startswith("127.") or self._server_ip == "localhost" else " --allow-remote"
        raise TeacherUnavailable(
            f"teacher {self.address}: {problem} (last heard: {last}), {what} waited for.{trouble} Start one with: "
            f"python -m teacher_server --model PATH --host {self._server_ip} --port {self._server_port}{remote}"
        )
