"""Send one request to a running server, with a time-out, and report why there was no reply.

libzmq reconnects silently whatever happens. The events of the connection tell a refused connection, a refused key and a
hung server apart, and each needs a different fix.
"""

from __future__ import annotations

import math
import os
import time

from teacher_server.client.connection import POLL_S, Connection, Message
from teacher_server.client.outage import OutageClock
from teacher_server.errors import ServerError
from teacher_server.wire.keys import PeerKeys
from teacher_server.wire.protocol import (
    ID_BYTES,
    DrainReply,
    DrainRequest,
    ErrorReply,
    ProtocolError,
    StatusReply,
    StatusRequest,
    requests,
)
from teacher_server.wire.status import ServerStatus, decode_status

_RESEND_S = 1.0  # delay after a lost request; both kinds of requests may be sent twice


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
        self._timeout_s = timeout_s
        clock = OutageClock(outage_budget_s=math.inf, stall_budget_s=math.inf)
        try:
            # A heartbeat time-out looks like the exit of the server, and each request has a time-out anyway.
            self._connection = Connection(endpoint, clock, keys, zmtp_heartbeats=False)
        except ServerError as error:
            raise ServerError(f"--server {error}") from error

    def __enter__(self) -> AdminLink:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

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
        """Drain one worker, or the server if `worker` is empty, and return the number of requests left.

        Can be repeated. Raises as `status`.
        """
        reply, _ = self._request(DrainRequest(request_id=os.urandom(ID_BYTES), worker=worker))
        if not isinstance(reply, DrainReply):
            raise ServerError(f"{self.endpoint} replied to a drain request with {type(reply).__name__}.")
        return reply.n_left

    def _request(self, request: StatusRequest | DrainRequest) -> Message:
        connection = self._connection
        frame = requests.encode(request)
        deadline_s = time.monotonic() + self._timeout_s
        send_s = 0.0
        while (now_s := time.monotonic()) < deadline_s:
            if now_s >= send_s and connection.send([frame]):
                send_s = now_s + _RESEND_S
            for reply, frames in connection.listen(min(POLL_S, deadline_s - now_s)).messages:
                if getattr(reply, "request_id", None) != request.request_id:
                    continue  # a second reply to an earlier request
                if isinstance(reply, ErrorReply):
                    raise ServerError(f"{self.endpoint}: {reply.text}.")
                return reply, frames
            if connection.n_unreadable:
                raise ServerError(f"{self.endpoint}: {connection.trouble}.")
            if connection.n_broken:
                raise ConnectionClosed(f"{self.endpoint} has closed the connection.")
            if connection.is_unreachable:
                raise NoReply(
                    f"cannot connect to {self.endpoint}: connection refused or host unreachable. "
                    "Fix: --server HOST:PORT of a running server."
                )
        raise NoReply(self._no_reply_text())

    def _no_reply_text(self) -> str:
        failed = f"no reply from {self.endpoint} within {self._timeout_s:g} s"
        if not self._connection.was_reached:
            return f"{failed}: not connected. Fix: --server HOST:PORT of a running server."
        if not self._connection.handshake_failure:
            return f"{failed}: connected, but the server is silent. Fix: see the server's log."
        if not self._connection.has_keys:
            return f"{failed}: connected, but the handshake was refused. Fix: --keys DIR, if the server runs with keys."
        return (
            f"{failed}: connected, but the handshake was refused. Fix: --keys with a bundle of this server (its "
            "server.key) whose key is in the server's clients/ folder; no --keys if the server runs without keys."
        )
