"""The client's side of a stream of rows, message by message and without a server."""

from __future__ import annotations

import numpy as np
import pytest

from gkd.teacher.requests import RequestMessage
from gkd.teacher.streams import RowBlocks
from teacher_server.wire.payload import pack_rows
from teacher_server.wire.protocol import STREAM_WINDOW, ProtocolError, RowsReply, as_frame, checksum, token_digest
from tests.service.messages import make_request, make_tokens
from tests.service.scripted_streams import matrix

N_ROWS, N_COLS = 30, 8
TOKENS = make_tokens(10 + N_ROWS)
ROWS = matrix("logits", N_ROWS, N_COLS)


def new_stream() -> RowBlocks:
    request = make_request(TOKENS, signal="logits", wire="fp32")
    message = RequestMessage("prompt 0", request, [as_frame(TOKENS)], token_digest(TOKENS), 1.0)
    return RowBlocks(message, (N_ROWS, N_COLS), lambda received: None)


def accept(stream: RowBlocks, index: int, start: int, stop: int, worker: str = "w0") -> bool | None:
    """Pass it a message of the worker's stream."""
    frames = pack_rows(ROWS[start:stop])
    reply = RowsReply(
        request_id=stream.request_id,
        token_digest=token_digest(TOKENS),
        model_fingerprint="f",
        worker=worker,
        stream_id=worker.encode().ljust(16),
        signal="logits",
        index=index,
        start=start,
        stop=stop,
        n_rows=N_ROWS,
        n_cols=N_COLS,
        dtype="float32",
        checksums=[checksum(frame) for frame in frames],
        queue_s=0.0,
        compute_s=0.0,
    )
    return stream.accept(reply, frames, 0.0)


def test_one_message_beyond_the_window_is_refused() -> None:
    """Fails if the window were larger than the memory that is planned for it."""
    stream = new_stream()
    for index in range(STREAM_WINDOW):
        assert accept(stream, index, index, index + 1) is None
    with pytest.raises(ProtocolError):
        accept(stream, STREAM_WINDOW, STREAM_WINDOW, STREAM_WINDOW + 1)


def test_another_worker_may_cut_the_rows_elsewhere() -> None:
    """Fails if rows of a message came twice where its first rows were taken from the worker before."""
    stream = new_stream()
    blocks = stream.blocks()
    assert accept(stream, 0, 0, 10) is None
    assert next(blocks)[0] == 0
    assert accept(stream, 0, 0, 6, "w1") is None
    assert accept(stream, 1, 6, 15, "w1") is None
    start, rows = next(blocks)
    assert start == 10
    np.testing.assert_array_equal(rows, ROWS[10:15])
    assert accept(stream, 2, 15, N_ROWS, "w1") is True
