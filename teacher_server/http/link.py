"""Ask a broker from an event loop: one DEALER socket, any number of requests in flight, heartbeats, resends.

A request is sent again under its id after a silence, after `busy`, and if a new epoch shows that the broker was
restarted. If the broker is silent for `_SILENT_BEATS` heartbeats, all requests are refused with status 503.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Sequence

import zmq
import zmq.asyncio

from teacher_server.http.question import Refusal
from teacher_server.wire.keys import PeerKeys, secure_peer
from teacher_server.wire.protocol import (
    ID_BYTES,
    Buffer,
    Cancel,
    ErrorReply,
    InfoRequest,
    Ping,
    Pong,
    ProtocolError,
    ScoreRequest,
    ServerMessage,
    StatusRequest,
    replies,
    requests,
)
from teacher_server.wire.sockets import set_common_options

log = logging.getLogger(__name__)

LIMIT_S = 600.0  # limit of a request, with all its resends
RESEND_S = 20.0
_RETRY_S = 0.05
_BEAT_S = 0.5
_SILENT_BEATS = 8
# Final errors -> status and fix. After other errors the request is sent again.
_FINAL = {
    "bad_request": (400, "change the request; /v1/models has the longest sequence"),
    "engine": (500, "see the log of the teacher server"),
    "worker_lost": (503, "see the log of the teacher server"),
}

Answer = tuple[ServerMessage, list[Buffer]]


class BrokerLink:
    """Connection to a broker, as an async context manager. Use it from one event loop.

    Args:
        endpoint: tcp://HOST:PORT
        keys: encrypt and authenticate the server; None disables encryption.
    """

    def __init__(self, endpoint: str, keys: PeerKeys | None) -> None:
        self.endpoint = endpoint
        self.epoch = b""  # the broker's process; empty before its first heartbeat
        self._keys = keys
        self._n_unheard = 0  # heartbeats since the last message; a suspended process sends none
        self._waiting: dict[bytes, asyncio.Future[Answer | None]] = {}  # None: send the request again
        self._closed = ""

    async def __aenter__(self) -> BrokerLink:
        self._context = zmq.asyncio.Context()
        self._open()
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self.refuse_all("this server is shutting down")
        self._task.cancel()
        await asyncio.wait([self._task])
        self._context.destroy(linger=0)

    def _open(self) -> None:
        self._socket = self._context.socket(zmq.DEALER)
        set_common_options(self._socket)
        self._socket.setsockopt(zmq.IDENTITY, b"h" + os.urandom(ID_BYTES - 1))
        self._socket.setsockopt(zmq.IMMEDIATE, 1)  # without a connection, sending is an error
        self._socket.setsockopt(zmq.RCVHWM, 0)
        if self._keys is not None:
            secure_peer(self._socket, self._keys)
        self._socket.connect(self.endpoint)

    @property
    def is_alive(self) -> bool:
        """Return whether the broker has answered one of the last heartbeats."""
        return self._n_unheard < _SILENT_BEATS and not self._closed

    def refuse_all(self, reason: str) -> None:
        """Refuse the requests in flight and all later ones with status 503."""
        self._closed = reason
        self._fail(reason)

    async def ask(self, request: ScoreRequest | InfoRequest | StatusRequest, frames: Sequence[Buffer] = ()) -> Answer:
        """Return the reply and its frames. A cancelled call cancels the request at the broker.

        Raises:
            ProtocolError: a value of the request is out of range.
            Refusal: the broker refuses the request, is silent, or has not answered within `LIMIT_S`.
        """
        message, request_id = [requests.encode(request), *frames], request.request_id
        answer = None
        try:
            async with asyncio.timeout(LIMIT_S):
                while answer is None or isinstance(answer[0], ErrorReply):
                    answer = await self._answer(request_id, message)
                    if answer is not None and isinstance(error := answer[0], ErrorReply):
                        if error.code in _FINAL:
                            status, fix = _FINAL[error.code]
                            raise Refusal(status, f"the teacher server: {error.text}. Fix: {fix}.")
                        await asyncio.sleep(max(error.retry_after_s, _RETRY_S))
        except TimeoutError as error:
            text = f"no scores from {self.endpoint} within {LIMIT_S:g} s. Fix: see `gkd teacher status`."
            raise Refusal(503, text) from error
        finally:
            if answer is None or isinstance(answer[0], ErrorReply):
                self._post([requests.encode(Cancel(request_id=request_id))])
        return answer

    async def _answer(self, request_id: bytes, message: Sequence[Buffer]) -> Answer | None:
        """Send a request and return its answer; None if it has to be sent again."""
        future = self._waiting[request_id] = asyncio.get_running_loop().create_future()
        try:
            await self._send(message)
            return await asyncio.wait_for(future, RESEND_S)
        except TimeoutError:
            return None
        finally:
            self._waiting.pop(request_id, None)

    async def _send(self, message: Sequence[Buffer]) -> None:
        while True:
            if not self.is_alive:
                raise Refusal(503, self._closed or self._gone())
            try:
                await self._socket.send_multipart(message, zmq.NOBLOCK, copy=False)
                return
            except zmq.ZMQError:  # no connection
                await asyncio.sleep(_RETRY_S)

    def _post(self, message: Sequence[Buffer]) -> None:
        """Send, or drop the message if there is no connection."""
        if not self._socket.closed:
            sent = asyncio.ensure_future(self._socket.send_multipart(message, zmq.NOBLOCK, copy=False))
            sent.add_done_callback(lambda done: done.cancelled() or done.exception())

    def _gone(self) -> str:
        return (
            f"no message from the teacher server {self.endpoint} for {_SILENT_BEATS * _BEAT_S:g} s. Fix: start it "
            "again (gkd teacher); requests are accepted when it is back."
        )

    async def _run(self) -> None:
        """Read replies and send heartbeats, until cancelled."""
        beat_s = 0.0
        while True:
            if await self._socket.poll(int(1000 * _BEAT_S)):
                self._read(await self._socket.recv_multipart(copy=False))
            if time.monotonic() < beat_s:
                continue
            beat_s = time.monotonic() + _BEAT_S
            self._post([requests.encode(Ping())])
            self._n_unheard += 1
            if self._n_unheard % _SILENT_BEATS == 0:
                if self._n_unheard == _SILENT_BEATS:
                    log.warning("%s", self._gone())
                self._fail(self._gone())
                self._socket.close(linger=0)  # libzmq does not connect again after a refused key
                self._open()

    def _read(self, frames: Sequence[zmq.Frame]) -> None:
        try:
            reply = replies.decode(frames[0].buffer)
        except ProtocolError as error:
            log.warning("an unreadable message of %s: %s", self.endpoint, error)
            return
        self._n_unheard = 0
        if isinstance(reply, Pong):
            if self.epoch not in (b"", reply.epoch):
                log.warning("%s was restarted; sending %d requests again", self.endpoint, len(self._waiting))
                for waiting in self._waiting.values():
                    if not waiting.done():
                        waiting.set_result(None)
            self.epoch = reply.epoch
            return
        future = self._waiting.get(reply.request_id)
        if future is not None and not future.done():
            future.set_result((reply, [frame.buffer for frame in frames[1:]]))

    def _fail(self, text: str) -> None:
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(Refusal(503, text))
