"""Requests whose result is a matrix, received in row blocks, in order and without gaps.

If a worker fails during a stream, another worker starts a new stream at row 0. The messages of a stream are numbered.
A message lost with a connection therefore shows as a gap, and the request is sent again under a new id.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import DTypeLike

from gkd.errors import TeacherError
from gkd.scoring.teacher.requests import PendingRequest, Reply, RequestMessage, T
from teacher_server.wire.payload import unpack_rows
from teacher_server.wire.protocol import (
    Buffer,
    HeadRequest,
    ProtocolError,
    Received,
    RowsReply,
    ScoreRequest,
)

_MAX_SENT = 3  # sends of a request under one id while no stream has started


class MatrixRequest(PendingRequest[T]):
    """Request a matrix and assemble it in place: holds one message in addition to it.

    Args:
        shape: (rows, columns) of the matrix.
        acknowledge: sends a `Received` to the server.
        result: makes the request's result of the matrix.
        dtype: of the matrix.
    """

    is_stream = True

    def __init__(
        self,
        message: RequestMessage[ScoreRequest | HeadRequest],
        shape: tuple[int, int],
        acknowledge: Callable[[Received], None],
        result: Callable[[np.ndarray], T],
        dtype: DTypeLike = np.float32,
    ) -> None:
        super().__init__(message)
        header = message.header
        self._signal = header.signal if isinstance(header, ScoreRequest) else "head"
        self._shape, self._wire, self._acknowledge = shape, header.wire, acknowledge
        self._result, self._dtype = result, dtype
        self._rows: np.ndarray | None = None
        self._n_sent_before = 0  # under earlier request ids
        self._reset_stream()

    def _reset_stream(self) -> None:
        self._stream_id, self._worker = b"", ""
        self._ended: set[bytes] = set()  # ids of replaced streams of this request
        self._received_s = 0.0
        self._n_messages = self._next_row = 0  # state of the current stream

    def renew_id(self) -> None:
        super().renew_id()
        self._reset_stream()
        self._n_sent_before = self.n_sent

    def needs_new_id(self, now_s: float) -> bool:
        if self._stream_id:
            return now_s - self._received_s >= self.resend_s
        return self.n_sent - self._n_sent_before >= _MAX_SENT

    def accept(self, reply: Reply, frames: list[Buffer], now_s: float) -> T | None:
        message = self._check(reply)
        if message.stream_id in self._ended:
            return None
        if message.stream_id != self._stream_id:
            self._begin(message)
        if message.index < self._n_messages:
            return None  # a duplicate
        if (message.index, message.start) != (self._n_messages, self._next_row):
            raise ProtocolError(
                f"message {message.index} of the stream starts at row {message.start}, expected message "
                f"{self._n_messages} at row {self._next_row}"
            )
        if message.worker != self._worker:
            raise ProtocolError(f"worker {message.worker!r} continued a stream of worker {self._worker!r}")
        self._put(message, unpack_rows(message, frames))
        self._n_messages, self._next_row, self._received_s = message.index + 1, message.stop, now_s
        done = Received(request_id=self.request_id, stream_id=message.stream_id, n_messages=self._n_messages)
        self._acknowledge(done)
        if message.stop < message.n_rows:
            return None
        assert self._rows is not None  # a message has at least one row
        return self._result(self._rows)

    def _check(self, reply: Reply) -> RowsReply:
        if not isinstance(reply, RowsReply):
            raise ProtocolError(f"received {type(reply).__name__} for a {self._signal} request")
        self._check_source(reply)
        received, expected = (reply.signal, reply.n_rows, reply.n_cols), (self._signal, *self._shape)
        if received != expected:
            raise ProtocolError(f"(signal, rows, columns) are {received}, expected {expected}")
        if self._wire == "fp16" and reply.dtype == "float32":
            raise ProtocolError("received float32 rows for a request with wire fp16")
        return reply

    def _begin(self, reply: RowsReply) -> None:
        if reply.index:
            raise ProtocolError(f"the first message of a stream has index {reply.index}")
        self._ended.add(self._stream_id)
        self._stream_id, self._worker = reply.stream_id, reply.worker
        self._n_messages = self._next_row = 0

    def _put(self, message: RowsReply, rows: np.ndarray) -> None:
        if self._signal == "logits" and rows.max(1).any():
            raise TeacherError(f"{self.name}, from worker {message.worker!r}: the largest logit of a row is not 0")
        if self._rows is None:
            self._rows = np.empty(self._shape, self._dtype)
        self._rows[message.start : message.stop] = rows
