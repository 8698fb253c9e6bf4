"""A matrix on its way to a client, row chunk by row chunk, no faster than the client takes it."""

from __future__ import annotations

import time
from dataclasses import dataclass

from teacher_server.engines.base import RowStream
from teacher_server.wire.payload import pack_rows, rows_per_message
from teacher_server.wire.protocol import STREAM_WINDOW, Buffer, RowsReply, Signal, checksum, replies

_AT_ONCE = STREAM_WINDOW // 2  # messages made by one call of the engine: small products are slow


@dataclass(slots=True, eq=False)
class OpenStream:
    """One stream of a worker. `head` holds what all of its messages say."""

    job_id: bytes
    stream_id: bytes
    rows: RowStream
    head: RowsReply  # index, start, stop and checksums are filled in for each message
    patience_s: float  # without a receipt for this long nobody waits any more
    deadline_s: float = 0.0
    index: int = 0
    start: int = 0
    received: int = 0

    @property
    def may_send(self) -> bool:
        return self.index - self.received + _AT_ONCE <= STREAM_WINDOW

    @property
    def finished(self) -> bool:
        return self.start == self.rows.n_rows

    def next_messages(self) -> list[tuple[list[Buffer], bool]]:
        """Up to four (message for the client, is it the last) pairs; what the engine raises comes through."""
        step = rows_per_message(self.rows.n_cols, self.rows.dtype)
        first, end = self.start, min(self.start + _AT_ONCE * step, self.rows.n_rows)
        made = self.rows.rows(first, end)
        messages: list[tuple[list[Buffer], bool]] = []
        for start in range(first, end, step):
            stop = min(start + step, end)
            frames = pack_rows(made[start - first : stop - first])
            self.head.index, self.head.start, self.head.stop = self.index, start, stop
            self.head.checksums = [checksum(frame) for frame in frames]
            messages.append(([replies.encode(self.head), *frames], stop == self.rows.n_rows))
            self.index, self.start = self.index + 1, stop
        return messages


def open_stream(
    job_id: bytes,
    request_id: bytes,
    digest: bytes,
    rows: RowStream,
    signal: Signal | str,
    *,
    stream_id: bytes,
    patience_s: float,
    model_fingerprint: str,
    worker: str,
    queue_s: float,
    compute_s: float,
) -> OpenStream:
    """Raises ProtocolError if a row does not fit a frame."""
    rows_per_message(rows.n_cols, rows.dtype)
    head = RowsReply(
        request_id=request_id,
        token_digest=digest,
        model_fingerprint=model_fingerprint,
        worker=worker,
        stream_id=stream_id,
        signal=signal,  # type: ignore[arg-type]
        index=0,
        start=0,
        stop=1,
        n_rows=rows.n_rows,
        n_cols=rows.n_cols,
        dtype=rows.dtype,
        checksums=[],
        queue_s=queue_s,
        compute_s=compute_s,
    )
    return OpenStream(job_id, stream_id, rows, head, patience_s, time.monotonic() + patience_s)
