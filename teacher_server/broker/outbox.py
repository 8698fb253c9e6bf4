"""Send the broker's messages to clients and workers."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import zmq

from teacher_server.broker.job import Job
from teacher_server.broker.status_board import StatusBoard
from teacher_server.wire.protocol import ErrorCode, ErrorReply, ServerMessage, replies
from teacher_server.wire.worker_protocol import BrokerMessage, to_worker

log = logging.getLogger(__name__)


class Outbox:
    """Send without blocking. A message that cannot be sent is dropped; a live peer sends its request again."""

    def __init__(self, front: zmq.Socket[bytes], board: StatusBoard) -> None:
        self._front = front
        self._board = board
        self._socket_of: dict[bytes, zmq.Socket[bytes]] = {}  # worker -> its socket

    def add_worker(self, worker: bytes, socket: zmq.Socket[bytes]) -> None:
        """Send messages for `worker` through `socket` from now on."""
        self._socket_of[worker] = socket

    def remove_worker(self, worker: bytes) -> None:
        self._socket_of.pop(worker, None)

    def to_client(self, client: bytes, frames: Sequence[Any]) -> None:
        self._send(self._front, client, frames)

    def reply(self, client: bytes, message: ServerMessage) -> None:
        self.to_client(client, [replies.encode(message)])

    def refuse(
        self, client: bytes, request_id: bytes, code: ErrorCode, text: str, *, retry_after_s: float = 0.0
    ) -> None:
        """Reply with an error, and count it."""
        self._board.refused(code)
        self.reply(client, ErrorReply(request_id=request_id, code=code, text=text[:4096], retry_after_s=retry_after_s))

    def refuse_job(self, job: Job, code: ErrorCode, text: str) -> None:
        self.refuse(job.client, job.request.request_id, code, text)

    def to_worker(self, worker: bytes, message: BrokerMessage, payload: Sequence[Any] = ()) -> None:
        """Send `message` if the worker is known. An unreachable worker is detected by its missing heartbeats."""
        socket = self._socket_of.get(worker)
        if socket is not None:
            self._send(socket, worker, [to_worker.encode(message), *payload])

    def _send(self, socket: zmq.Socket[bytes], identity: bytes, frames: Sequence[Any]) -> None:
        try:
            socket.send_multipart([identity, *frames], zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:  # EHOSTUNREACH: disconnected. EAGAIN: the peer does not read.
            log.warning("could not send to %s: %s", identity.hex(), error.strerror)
