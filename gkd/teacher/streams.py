"""Requests whose result is a matrix, received in row blocks: each row exactly once and in order.

If a worker fails during a stream, another worker starts a new stream at row 0; rows that were already received are
skipped. The messages of a stream are numbered. A message lost with a connection therefore shows as a gap, and the
request is sent again under a new id.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from gkd.errors import TeacherError
from gkd.teacher.requests import PendingRequest, Reply, RequestMessage, T
from teacher_server.wire.payload import unpack_rows
from teacher_server.wire.protocol import (
    STREAM_WINDOW,
    Buffer,
    HeadRequest,
    ProtocolError,
    Received,
    RowsReply,
    ScoreRequest,
)

_MAX_SENT = 3  # sends of a request under one id while no stream has started


class _MatrixRequest(PendingRequest[T]):
    """Base of both kinds of streams: checks the order of messages and acknowledges them.

    Args:
        shape: (rows, columns) of the matrix.
        acknowledge: sends a `Received` to the server; called from any thread, with the lock held.
    """

    is_stream = True

    def __init__(
        self,
        message: RequestMessage[ScoreRequest | HeadRequest],
        shape: tuple[int, int],
        acknowledge: Callable[[Received], None],
    ) -> None:
        super().__init__(message)
        header = message.header
        self._signal = header.signal if isinstance(header, ScoreRequest) else "head"
        self._shape, self._wire, self._acknowledge = shape, header.wire, acknowledge
        self._lock = threading.Condition()  # shared with the consumer's thread
        self._n_rows_held = 0  # rows [0, n) need not be received again
        self._n_sent_before = 0  # under earlier request ids
        self._reset_stream()

    def _reset_stream(self) -> None:
        self._stream_id, self._worker = b"", ""
        self._ended: set[bytes] = set()  # ids of replaced streams of this request
        self._received_s = 0.0
        self._n_messages = self._n_acknowledged = self._next_row = 0  # state of the current stream

    def renew_id(self) -> None:
        with self._lock:
            super().renew_id()
            self._reset_stream()
            self._n_sent_before = self.n_sent

    def needs_new_id(self, now_s: float) -> bool:
        if self.paused:
            return False
        if self._stream_id:
            return now_s - self._received_s >= self.resend_s
        return self.n_sent - self._n_sent_before >= _MAX_SENT

    def accept(self, reply: Reply, frames: list[Buffer], now_s: float) -> T | None:
        with self._lock:
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
            if message.index >= self._n_acknowledged + STREAM_WINDOW:
                raise ProtocolError(f"more than {STREAM_WINDOW} messages of a stream were sent without acknowledgment")
            if message.worker != self._worker:
                raise ProtocolError(f"worker {message.worker!r} continued a stream of worker {self._worker!r}")
            rows = unpack_rows(message, frames)
            self._n_messages, self._next_row, self._received_s = message.index + 1, message.stop, now_s
            if message.stop <= self._n_rows_held:
                self._ack(message.stream_id, self._n_messages)
            else:
                n_known = max(0, self._n_rows_held - message.start)
                self._put(message, message.start + n_known, rows[n_known:])
                self._n_rows_held = message.stop
            return self._result() if message.stop == message.n_rows else None

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
        self._n_messages = self._n_acknowledged = self._next_row = 0
        self._n_rows_held = self._rows_kept()

    def _ack(self, stream_id: bytes, n_messages: int) -> None:
        if stream_id == self._stream_id:  # otherwise the stream has been replaced
            self._n_acknowledged = n_messages
            self._acknowledge(Received(request_id=self.request_id, stream_id=stream_id, n_messages=n_messages))

    def _rows_kept(self) -> int:
        """Return how many leading rows are kept when a new stream starts."""
        raise NotImplementedError

    def _put(self, reply: RowsReply, start: int, rows: np.ndarray) -> None:
        raise NotImplementedError

    def _result(self) -> T:
        raise NotImplementedError


class WholeMatrix(_MatrixRequest[np.ndarray]):
    """Return the whole matrix, [rows, cols] float32, assembled in place: holds one message in addition to it."""

    _rows: np.ndarray | None = None

    def _rows_kept(self) -> int:
        return self._n_rows_held

    def _put(self, reply: RowsReply, start: int, rows: np.ndarray) -> None:
        if self._rows is None:
            self._rows = np.empty(self._shape, np.float32)
        self._rows[start : start + len(rows)] = rows
        self._ack(reply.stream_id, self._n_messages)

    def _result(self) -> np.ndarray:
        assert self._rows is not None  # called after the last `_put`
        return self._rows


class _Block(NamedTuple):
    stream_id: bytes
    n_messages: int  # messages of its stream, including this one
    start: int
    rows: np.ndarray


class RowBlocks(_MatrixRequest[bool]):
    """Yield the matrix in row blocks; at most `STREAM_WINDOW` blocks wait for the consumer."""

    def __init__(
        self,
        message: RequestMessage[ScoreRequest | HeadRequest],
        shape: tuple[int, int],
        acknowledge: Callable[[Received], None],
    ) -> None:
        super().__init__(message, shape, acknowledge)
        self._waiting: deque[_Block] = deque()
        self._n_rows_consumed = 0
        self.future.add_done_callback(self._wake_consumer)

    def blocks(self) -> Iterator[tuple[int, np.ndarray]]:
        """Yield (first row, [rows, cols] float32) in order. Closing the iterator cancels the request. One thread."""
        try:
            while True:
                with self._lock:
                    self._lock.wait_for(lambda: self._waiting or self.future.done())
                    if not self._waiting:
                        self.future.result()  # raises the stream's error
                        return
                    block = self._waiting.popleft()
                    self._n_rows_consumed = block.start + len(block.rows)
                    self._ack(block.stream_id, block.n_messages)
                yield block.start, block.rows
        finally:
            self.future.cancel()

    @property
    def paused(self) -> bool:
        return bool(self._waiting)

    def _wake_consumer(self, _: object) -> None:
        with self._lock:
            self._lock.notify_all()

    def _rows_kept(self) -> int:
        self._waiting.clear()  # the new stream sends them again; keeping them could hold twice the window
        return self._n_rows_consumed

    def _put(self, reply: RowsReply, start: int, rows: np.ndarray) -> None:
        if self._signal == "logits" and rows.max(1).any():
            raise TeacherError(f"{self.name}, from worker {reply.worker!r}: the largest logit of a row is not 0")
        self._waiting.append(_Block(reply.stream_id, self._n_messages, start, rows))
        self._lock.notify_all()

    def _result(self) -> bool:
        return True
