"""One question to a running server, with a bounded wait, and why there was no answer.

Silence alone says little: libzmq connects again and again whatever happens. Its monitor tells a
closed port from a refused key, and that is what a person has to know.
"""

from __future__ import annotations

import contextlib
import os
import time
from types import TracebackType

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

_RESEND_S = 1.0  # a lost question costs this much; both kinds may be asked twice
_WATCHED = zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED


class NoAnswer(ServerError):
    """Nobody answered in time; the text says what the connection did."""


class Gone(NoAnswer):
    """The other end has closed the connection."""


class AdminLink:
    """A connection for `status` and `drain`. One thread.

    Args:
        endpoint: tcp://HOST:PORT
        timeout_s: bound on each question.
    """

    def __init__(self, endpoint: str, keys: PeerKeys | None, timeout_s: float) -> None:
        self.endpoint = endpoint
        self._keys, self._timeout_s = keys, timeout_s
        self._connected = self._greeted = False
        self._context = zmq.Context()
        self._dealer = self._context.socket(zmq.DEALER)
        set_common_options(self._dealer)
        # They would break the connection of a silent server, as its end does; each question is bounded anyway.
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

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self._dealer.disable_monitor()
        self._context.destroy(linger=0)

    def status(self) -> ServerStatus:
        """Raises NoAnswer, as Gone if the server has left; ServerError if the answer is an error or damaged."""
        reply, frames = self._ask(StatusRequest(request_id=os.urandom(ID_BYTES)))
        if not isinstance(reply, StatusReply):
            raise ServerError(f"{self.endpoint} answered a status request with {type(reply).__name__}.")
        try:
            return decode_status(reply, frames)
        except ProtocolError as error:
            raise ServerError(f"{self.endpoint}: {error}.") from error

    def drain(self, worker: str) -> int:
        """Ask for it; may be asked again. Returns how many requests are left. Raises as `status`."""
        reply, _ = self._ask(DrainRequest(request_id=os.urandom(ID_BYTES), worker=worker))
        if not isinstance(reply, DrainReply):
            raise ServerError(f"{self.endpoint} answered a drain request with {type(reply).__name__}.")
        return reply.n_left

    def _ask(self, question: StatusRequest | DrainRequest) -> tuple[ServerMessage, list[Buffer]]:
        frame = requests.encode(question)
        deadline_s = time.monotonic() + self._timeout_s
        send_s = 0.0
        poller = zmq.Poller()
        poller.register(self._dealer, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        while (now_s := time.monotonic()) < deadline_s:
            if now_s >= send_s:
                with contextlib.suppress(zmq.Again):  # a refused handshake leaves no pipe to put it into
                    self._dealer.send(frame, zmq.NOBLOCK)
                send_s = now_s + _RESEND_S
            ready = dict(poller.poll(max(1, int((min(deadline_s, send_s) - now_s) * 1000))))
            if self._dealer in ready:
                found = self._read(question.request_id)
                if found is not None:
                    return found
            elif self._monitor in ready:
                self._note(int(recv_monitor_message(self._monitor)["event"]))
        raise NoAnswer(self._why_not())

    def _read(self, request_id: bytes) -> tuple[ServerMessage, list[Buffer]] | None:
        frames = self._dealer.recv_multipart()
        try:
            reply = replies.decode(frames[0])
        except ProtocolError as error:
            raise ServerError(f"{self.endpoint}: {error}.") from error
        if getattr(reply, "request_id", None) != request_id:
            return None  # the second answer to an earlier question
        if isinstance(reply, ErrorReply):
            raise ServerError(f"{self.endpoint}: {reply.text}.")
        return reply, [*frames[1:]]

    def _note(self, event: int) -> None:
        if event == zmq.EVENT_DISCONNECTED and self._greeted:
            raise Gone(f"{self.endpoint} has closed the connection.")
        self._connected = self._connected or event == zmq.EVENT_CONNECTED
        self._greeted = self._greeted or event == zmq.EVENT_HANDSHAKE_SUCCEEDED

    def _why_not(self) -> str:
        where = f"no answer from {self.endpoint} within {self._timeout_s:g} s"
        if not self._connected:
            return f"{where}: nothing listens there. Fix: --server HOST:PORT of a running server."
        if not self._greeted:
            if self._keys is None:
                return f"{where}: it listens, but does not let us in. Fix: --keys with a bundle, if it runs with keys."
            return (
                f"{where}: it listens, but does not let us in. Fix: a bundle of this server (its server.key), with a "
                "key that is in its clients/ folder; none if it runs without keys."
            )
        return f"{where}: it is connected and silent. Fix: look at the server's log."
