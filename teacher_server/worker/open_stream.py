"""Send a matrix to a client in chunks of rows, within the window of messages that the client has not confirmed."""

from __future__ import annotations

import time
from dataclasses import dataclass

from teacher_server.engines.base import RowStream
from teacher_server.wire.payload import pack_rows, rows_per_message
from teacher_server.wire.protocol import STREAM_WINDOW, Buffer, RowsReply, checksum, replies
from teacher_server.wire.worker_protocol import Assignment

_AT_ONCE = STREAM_WINDOW // 2  # messages per call of the engine, because small matrix products are slow


@dataclass(slots=True, eq=False)
class OpenStream:
    """One stream of a worker."""

    job_id: bytes
    stream_id: bytes
    rows: RowStream
    header: RowsReply  # common to all messages; index, start, stop and checksums are set for each one
    timeout_s: float  # without a receipt for this long the stream is closed
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
        """Compute up to four messages: (frames for the client, whether it is the last). Engine errors propagate."""
        step = rows_per_message(self.rows.n_cols, self.rows.dtype)
        first, end = self.start, min(self.start + _AT_ONCE * step, self.rows.n_rows)
        chunk = self.rows.rows(first, end)
        messages: list[tuple[list[Buffer], bool]] = []
        for start in range(first, end, step):
            stop = min(start + step, end)
            frames = pack_rows(chunk[start - first : stop - first])
            self.header.index, self.header.start, self.header.stop = self.index, start, stop
            self.header.checksums = [checksum(frame) for frame in frames]
            messages.append(([replies.encode(self.header), *frames], stop == self.rows.n_rows))
            self.index, self.start = self.index + 1, stop
        return messages


def open_stream(
    job: Assignment,
    request_id: bytes,
    digest: bytes,
    rows: RowStream,
    signal: str,
    *,
    model_fingerprint: str,
    worker: str,
    queue_s: float,
    compute_s: float,
) -> OpenStream:
    """Open a stream. Raises ProtocolError if a row does not fit a frame."""
    rows_per_message(rows.n_cols, rows.dtype)
    header = RowsReply(
        request_id=request_id,
        token_digest=digest,
        model_fingerprint=model_fingerprint,
        worker=worker,
        stream_id=job.stream_id,
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
    return OpenStream(job.job_id, job.stream_id, rows, header, job.remaining_s, time.monotonic() + job.remaining_s)
