"""A scripted server that streams rows message by message."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from typing import Any

import numpy as np
from msgspec import structs

from teacher_server.wire.payload import rows_per_message
from teacher_server.wire.protocol import (
    STREAM_WINDOW,
    Cancel,
    ClientMessage,
    ErrorReply,
    HeadRequest,
    Received,
    ScoreRequest,
    replies,
    token_digest,
)
from tests.service.messages import rows_message
from tests.service.scripted import N_HIDDEN, N_VOCAB, Message, ScriptedServer, one


def matrix(signal: str, n_rows: int, n_cols: int) -> np.ndarray:
    """Return [rows, columns] float32 with distinct rows; for logits the maximum of each row is 0."""
    rows = -(np.arange(n_rows)[:, None] * 64.0 + np.arange(n_cols)).astype(np.float32)
    return rows - rows.max(1, keepdims=True) if signal == "logits" else rows


class Stream:
    """One attempt at a stream. A message is made when the window allows to send it."""

    def __init__(self, request: ScoreRequest | HeadRequest, digest: bytes, n_rows: int, n_cols: int, step: int) -> None:
        signal: Any = request.signal if isinstance(request, ScoreRequest) else "head"
        self.request_id, self.stream_id, self._request = request.request_id, os.urandom(16), request
        self.rows = matrix(signal, n_rows, n_cols)
        self.n_sent = self.n_received = self.most_ahead = 0
        self.worker = "w0"
        self._digest, self._step = digest, step
        self.n_messages = -(-n_rows // step)

    def message(self, index: int, **changes: Any) -> Message:
        start = index * self._step
        stop = min(start + self._step, len(self.rows))
        header, frames = rows_message(self._request, self._digest, self.rows, start, stop, self.stream_id, index)
        fields = {"model_fingerprint": "model-a", "worker": self.worker} | changes
        return [replies.encode(structs.replace(header, **fields)), *frames]


class StreamingServer(ScriptedServer):
    """Stream rows to clients, `rows_a_message` at a time, as far ahead as the window allows.

    `on_next(stream, index)` returns the messages sent in place of message `index`, by default
    `[stream.message(index)]`.
    """

    def __init__(self, *, rows_a_message: int = 1) -> None:
        super().__init__(lambda request, tokens, n: [])
        assert rows_a_message <= rows_per_message(N_VOCAB, "float32")
        self.streams: list[Stream] = []
        self.on_next: Callable[[Stream, int], list[Message]] = lambda stream, index: [stream.message(index)]
        self._rows_a_message = rows_a_message
        self._by_request: dict[bytes, Stream] = {}

    def _handle(self, identity: bytes, request: ClientMessage, frames: list[bytes]) -> None:
        super()._handle(identity, request, frames)
        stream = None
        if isinstance(request, ScoreRequest) and request.request_id not in self._by_request:
            n_cols = N_HIDDEN if request.signal == "hidden" else request.n_vocab or N_VOCAB
            digest = token_digest(frames[0])
            stream = Stream(request, digest, request.n_response, n_cols, self._rows_a_message)
        elif isinstance(request, HeadRequest) and request.request_id not in self._by_request:
            stream = Stream(request, bytes(16), N_VOCAB, N_HIDDEN, self._rows_a_message)
        if stream is not None:
            self.begin(stream)
        elif isinstance(request, Received):
            stream = self._by_request.get(request.request_id)
            if stream is None or stream.stream_id != request.stream_id:
                return
            stream.n_received = request.n_messages
        elif isinstance(request, Cancel):
            self._by_request.pop(request.request_id, None)
        if stream is not None:
            self.pump(identity, stream)

    def begin(self, stream: Stream) -> None:
        self.streams.append(stream)
        self._by_request[stream.request_id] = stream

    def expire(self, stream: Stream) -> list[Message]:
        """Forget a request, and return the reply to it after its deadline."""
        del self._by_request[stream.request_id]
        return one(ErrorReply(request_id=stream.request_id, code="deadline", text="scripted"))

    def retry(self, identity: bytes, stream: Stream) -> Stream:
        """Start a new stream for the same request, as after the loss of a worker."""
        again = copy.copy(stream)
        again.stream_id, again.worker, again.n_sent, again.n_received = os.urandom(16), "w1", 0, 0
        self.begin(again)
        self.pump(identity, again)
        return again

    def pump(self, identity: bytes, stream: Stream) -> None:
        while stream.n_sent < min(stream.n_received + STREAM_WINDOW, stream.n_messages):
            stream.n_sent += 1
            stream.most_ahead = max(stream.most_ahead, stream.n_sent - stream.n_received)
            self.send(identity, self.on_next(stream, stream.n_sent - 1))
            if self._by_request.get(stream.request_id) is not stream:
                return
