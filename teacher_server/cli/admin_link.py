"""Send one request to a running server, with a time-out, and report why there was no reply.

libzmq reconnects silently whatever happens. Its socket monitor tells a refused connection, a refused
key and a hung server apart, and each needs a different fix.
"""

from __future__ import annotations

import contextlib
import os
import time

import zmq
from zmq.utils.monitor import recv_monitor_message

from teacher_server.errors import ServerError
from teacher_server.wire.keys import PeerKeys, secure_peer
from teacher_server.wire.protocol import (
    ID_BYTES,
    Buffer,
    DrainReply,
    DrainRequest,
    ErrorReply,
    ProtocolError,
    ServerMessage,
    StatusReply,
    StatusRequest,
    replies,
    requests,
)
from teacher_server.wire.sockets import set_common_options
from teacher_server.wire.status import ServerStatus, decode_status

_RESEND_S = 1.0  # delay after a lost request; both kinds of requests may be sent twice
# CLOSED: an attempt to connect has failed, for example because the port is closed.
_HANDSHAKE_REFUSED = zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_AUTH
_WATCHED = zmq.EVENT_CONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_HANDSHAKE_SUCCEEDED | _HANDSHAKE_REFUSED


class NoReply(ServerError):
    """The server did not reply in time. The text states the state of the connection."""


class ConnectionClosed(NoReply):
    """The server has closed the connection."""


class AdminLink:
    """Connection for `status` and `drain`. Use it from one thread.

    Args:
        endpoint: tcp://HOST:PORT
        timeout_s: limit for each request.
    """

    def __init__(self, endpoint: str, keys: PeerKeys | None, timeout_s: float) -> None:
        self.endpoint = endpoint
        self._keys, self._timeout_s = keys, timeout_s
        self._connected = self._handshaken = self._refused = False
        self._context = zmq.Context()
        self._dealer = self._context.socket(zmq.DEALER)
        set_common_options(self._dealer)
        # A heartbeat time-out looks like the exit of the server, and each request has a time-out anyway.
        self._dealer.setsockopt(zmq.HEARTBEAT_IVL, 0)
        self._dealer.setsockopt(zmq.IDENTITY, b"a" + os.urandom(ID_BYTES - 1))
        if keys is not None:
            secure_peer(self._dealer, keys)
        self._monitor = self._dealer.get_monitor_socket(_WATCHED)
        try:
            self._dealer.connect(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise ServerError(f"--server {endpoint.removeprefix('tcp://')}: {error.strerror}.") from error

    def __enter__(self) -> AdminLink:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._dealer.disable_monitor()
        self._context.destroy(linger=0)

    def status(self) -> ServerStatus:
        """Request the status.

        Raises:
            NoReply: if there is no reply in time; ConnectionClosed if the server has closed the connection.
            ServerError: if the reply is an error or damaged.
        """
        reply, frames = self._request(StatusRequest(request_id=os.urandom(ID_BYTES)))
        if not isinstance(reply, StatusReply):
            raise ServerError(f"{self.endpoint} replied to a status request with {type(reply).__name__}.")
        try:
            return decode_status(reply, frames)
        except ProtocolError as error:
            raise ServerError(f"{self.endpoint}: {error}.") from error

    def drain(self, worker: str) -> int:
        """Drain one worker, or the server if `worker` is empty. Can be repeated.

        Returns:
            The number of requests left.

        Raises:
            NoReply, ServerError: as `status`.
        """
        reply, _ = self._request(DrainRequest(request_id=os.urandom(ID_BYTES), worker=worker))
        if not isinstance(reply, DrainReply):
            raise ServerError(f"{self.endpoint} replied to a drain request with {type(reply).__name__}.")
        return reply.n_left

    def _request(self, request: StatusRequest | DrainRequest) -> tuple[ServerMessage, list[Buffer]]:
        frame = requests.encode(request)
        deadline_s = time.monotonic() + self._timeout_s
        send_s = 0.0
        poller = zmq.Poller()
        poller.register(self._dealer, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        while (now_s := time.monotonic()) < deadline_s:
            if now_s >= send_s:
                with contextlib.suppress(zmq.Again):  # after a refused handshake the socket has no pipe
                    self._dealer.send(frame, zmq.NOBLOCK)
                send_s = now_s + _RESEND_S
            ready = dict(poller.poll(max(1, int((min(deadline_s, send_s) - now_s) * 1000))))
            if self._dealer in ready:
                found = self._read(request.request_id)
                if found is not None:
                    return found
            elif self._monitor in ready:
                self._on_connection(int(recv_monitor_message(self._monitor)["event"]))
        raise NoReply(self._no_reply_text())

    def _read(self, request_id: bytes) -> tuple[ServerMessage, list[Buffer]] | None:
        frames = self._dealer.recv_multipart()
        try:
            reply = replies.decode(frames[0])
        except ProtocolError as error:
            raise ServerError(f"{self.endpoint}: {error}.") from error
        if getattr(reply, "request_id", None) != request_id:
            return None  # a second reply to an earlier request
        if isinstance(reply, ErrorReply):
            raise ServerError(f"{self.endpoint}: {reply.text}.")
        return reply, [*frames[1:]]

    def _on_connection(self, event: int) -> None:
        if event == zmq.EVENT_DISCONNECTED and self._handshaken:
            raise ConnectionClosed(f"{self.endpoint} has closed the connection.")
        if event == zmq.EVENT_CLOSED and not self._connected:
            raise NoReply(
                f"cannot connect to {self.endpoint}: connection refused or host unreachable. "
                "Fix: --server HOST:PORT of a running server."
            )
        self._connected = self._connected or event == zmq.EVENT_CONNECTED
        self._handshaken = self._handshaken or event == zmq.EVENT_HANDSHAKE_SUCCEEDED
        self._refused = self._refused or bool(event & _HANDSHAKE_REFUSED)

    def _no_reply_text(self) -> str:
        failed = f"no reply from {self.endpoint} within {self._timeout_s:g} s"
        if not self._connected:
            return f"{failed}: not connected. Fix: --server HOST:PORT of a running server."
        if self._refused and self._keys is None:
            return f"{failed}: connected, but the handshake was refused. Fix: --keys DIR, if the server runs with keys."
        if self._refused:
            return (
                f"{failed}: connected, but the handshake was refused. Fix: --keys with a bundle of this server (its "
                "server.key) whose key is in the server's clients/ folder; no --keys if the server runs without keys."
            )
        return f"{failed}: connected, but the server is silent. Fix: see the server's log."
