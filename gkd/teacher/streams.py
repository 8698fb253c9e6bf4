"""A matrix that comes in row pieces: every row once and in order, whoever sends it and however often.

A worker that fails in the middle of a stream is replaced by another one, which begins a new stream at
row 0; rows that are here already are then skipped. Messages of a stream are numbered, so one that was
lost with a broken connection shows as a gap, and the whole is asked for under a new request id.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from gkd.errors import TeacherError
from gkd.teacher.pending import Answer, Pending, T, check_source
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

_PATIENCE = 3  # times a stream that never began is asked for under one id


@dataclass(frozen=True, slots=True)
class Shape:
    """What the stream must be. `digest`: of the tokens it is about; zeros for the LM head."""

    signal: Literal["logits", "hidden", "head"]
    n_rows: int
    n_cols: int
    digest: bytes


class _Rows(Pending[T]):
    """What both kinds of streams share: the order of messages, and what has been acknowledged.

    Args:
        acknowledge: brings a `Received` to the server; called from any thread, with the lock held.
    """

    is_stream = True

    def __init__(
        self,
        where: str,
        query: ScoreRequest | HeadRequest,
        frames: Sequence[Buffer],
        shape: Shape,
        acknowledge: Callable[[Received], None],
        *,
        resend_s: float,
    ) -> None:
        super().__init__(where, query, frames, resend_s=resend_s)
        self.shape, self._wire, self._acknowledge = shape, query.wire, acknowledge
        self._lock = threading.Condition()  # a consumer's thread takes and acknowledges pieces
        self._n_rows_here = 0  # rows [0, n) need not come again
        self._n_sent_before = 0  # under earlier ids
        self._forget_stream()

    def _forget_stream(self) -> None:
        self._stream_id, self._worker = b"", ""
        self._ended: set[bytes] = set()  # earlier streams of this request id
        self._heard_s = 0.0
        self._n_messages = self._n_received = self._next_row = 0  # of the stream that runs now

    def rename(self) -> None:
        with self._lock:
            super().rename()
            self._forget_stream()
            self._n_sent_before = self.n_sent

    def is_lost(self, now_s: float) -> bool:
        if self.paused:
            return False
        if self._stream_id:
            return now_s - self._heard_s >= self.resend_s
        return self.n_sent - self._n_sent_before >= _PATIENCE

    def take(self, answer: Answer, frames: list[Buffer], now_s: float) -> T | None:
        with self._lock:
            reply = self._check(answer)
            if reply.stream_id in self._ended:
                return None
            if reply.stream_id != self._stream_id:
                self._begin(reply)
            if reply.index < self._n_messages:
                return None  # a duplicate
            if (reply.index, reply.start) != (self._n_messages, self._next_row):
                raise ProtocolError(
                    f"message {reply.index} of the stream holds row {reply.start}, expected were message "
                    f"{self._n_messages} and row {self._next_row}"
                )
            if reply.index >= self._n_received + STREAM_WINDOW:
                raise ProtocolError(f"more than {STREAM_WINDOW} messages of a stream were sent ahead")
            if reply.worker != self._worker:
                raise ProtocolError(f"a stream of worker {self._worker!r} goes on from {reply.worker!r}")
            rows = unpack_rows(reply, frames)
            self._n_messages, self._next_row, self._heard_s = reply.index + 1, reply.stop, now_s
            if reply.stop <= self._n_rows_here:
                self._received(reply.stream_id, self._n_messages)
            else:
                n_known = max(0, self._n_rows_here - reply.start)
                self._put(reply, reply.start + n_known, rows[n_known:])
                self._n_rows_here = reply.stop
            return self._result() if reply.stop == reply.n_rows else None

    def _check(self, answer: Answer) -> RowsReply:
        if not isinstance(answer, RowsReply):
            raise ProtocolError(f"{type(answer).__name__} is no answer to {self.shape.signal}")
        check_source(self.shape.digest, answer)
        got = (answer.signal, answer.n_rows, answer.n_cols)
        wanted = (self.shape.signal, self.shape.n_rows, self.shape.n_cols)
        if got != wanted:
            raise ProtocolError(f"(signal, rows, columns) are {got}, expected {wanted}")
        if self._wire == "fp16" and answer.dtype == "float32":
            raise ProtocolError("float32 rows came where two bytes a number were asked for")
        return answer

    def _begin(self, reply: RowsReply) -> None:
        if reply.index:
            raise ProtocolError(f"a stream begins with message {reply.index}")
        self._ended.add(self._stream_id)
        self._stream_id, self._worker = reply.stream_id, reply.worker
        self._n_messages = self._n_received = self._next_row = 0
        self._n_rows_here = self._rows_kept()

    def _received(self, stream_id: bytes, n_messages: int) -> None:
        if stream_id == self._stream_id:  # not about a stream that has been replaced
            self._n_received = n_messages
            self._acknowledge(Received(request_id=self.request_id, stream_id=stream_id, n_messages=n_messages))

    def _rows_kept(self) -> int:
        """Rows that need not come again when the stream starts over."""
        raise NotImplementedError

    def _put(self, reply: RowsReply, start: int, rows: np.ndarray) -> None:
        raise NotImplementedError

    def _result(self) -> T:
        raise NotImplementedError


class WholeRows(_Rows[np.ndarray]):
    """The matrix put together in place, float32: never more than itself and one message."""

    _rows: np.ndarray | None = None

    def _rows_kept(self) -> int:
        return self._n_rows_here

    def _put(self, reply: RowsReply, start: int, rows: np.ndarray) -> None:
        if self._rows is None:
            self._rows = np.empty((self.shape.n_rows, self.shape.n_cols), np.float32)
        self._rows[start : start + len(rows)] = rows
        self._received(reply.stream_id, self._n_messages)

    def _result(self) -> np.ndarray:
        assert self._rows is not None  # the last message has just been put
        return self._rows


class _Piece(NamedTuple):
    stream_id: bytes
    n_messages: int  # of its stream, this one included
    start: int
    rows: np.ndarray


class PiecewiseRows(_Rows[bool]):
    """The matrix handed on piece by piece; at most `STREAM_WINDOW` pieces wait here for their consumer."""

    def __init__(
        self,
        where: str,
        query: ScoreRequest | HeadRequest,
        frames: Sequence[Buffer],
        shape: Shape,
        acknowledge: Callable[[Received], None],
        *,
        resend_s: float,
    ) -> None:
        super().__init__(where, query, frames, shape, acknowledge, resend_s=resend_s)
        self._waiting: deque[_Piece] = deque()
        self._n_rows_taken = 0
        self.future.add_done_callback(self._wake_consumer)

    def pieces(self) -> Iterator[tuple[int, np.ndarray]]:
        """(first row, [rows, C] float32) in order; one thread. Leaving it early cancels the request."""
        try:
            while True:
                with self._lock:
                    self._lock.wait_for(lambda: self._waiting or self.future.done())
                    if not self._waiting:
                        self.future.result()  # raises what ended the stream
                        return
                    piece = self._waiting.popleft()
                    self._n_rows_taken = piece.start + len(piece.rows)
                    self._received(piece.stream_id, piece.n_messages)
                yield piece.start, piece.rows
        finally:
            self.future.cancel()

    @property
    def paused(self) -> bool:
        return bool(self._waiting)

    def _wake_consumer(self, _: object) -> None:
        with self._lock:
            self._lock.notify_all()

    def _rows_kept(self) -> int:
        self._waiting.clear()  # it comes again; keeping it, too, could hold twice the window
        return self._n_rows_taken

    def _put(self, reply: RowsReply, start: int, rows: np.ndarray) -> None:
        if self.shape.signal == "logits" and rows.max(1).any():
            raise TeacherError(f"{self.where}, from worker {reply.worker!r}: a row of logits has not 0 as its largest")
        self._waiting.append(_Piece(reply.stream_id, self._n_messages, start, rows))
        self._lock.notify_all()

    def _result(self) -> bool:
        return True
