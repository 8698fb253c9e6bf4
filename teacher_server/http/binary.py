"""The answer to `Accept: application/x-gkt`: the frames of each sequence's reply as they are, 5 bytes an entry."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from teacher_server.wire.protocol import Buffer, ScoreReply, replies

MEDIA_TYPE = "application/x-gkt"


def as_message(reply: ScoreReply, frames: Sequence[Buffer]) -> bytes:
    """Return a reply as bytes: the number of frames and their sizes as little-endian uint32, then the frames."""
    parts = [replies.encode(reply), *frames]
    sizes = np.array([len(parts), *(memoryview(part).nbytes for part in parts)], "<u4")
    return b"".join([sizes.tobytes(), *parts])


def read_messages(body: Buffer) -> list[tuple[ScoreReply, list[Buffer]]]:
    """Return the replies in the body of an answer, for `payload.unpack_topk`.

    Raises:
        ProtocolError, ValueError: the body is damaged.
    """
    found: list[tuple[ScoreReply, list[Buffer]]] = []
    at, body = 0, memoryview(body)
    while at < body.nbytes:
        n_frames = int(np.frombuffer(body, "<u4", 1, at)[0])
        sizes = np.frombuffer(body, "<u4", n_frames, at + 4).tolist()
        at += 4 * (1 + n_frames)
        frames = [body[at + end - size : at + end] for size, end in zip(sizes, np.cumsum(sizes).tolist(), strict=True)]
        at += sum(sizes)
        header = replies.decode(frames[0])
        if isinstance(header, ScoreReply):
            found.append((header, [*frames[1:]]))
    return found
