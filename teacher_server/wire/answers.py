"""Check and unpack the frames of a `GenerateRequest` and of its reply: token ids of prompts and of answers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from teacher_server.wire.protocol import MAX_ID, Buffer, GenerateReply, GenerateRequest, ProtocolError, checksum
from teacher_server.wire.table import row_slices


def unpack_prompts(request: GenerateRequest, frames: Sequence[Buffer]) -> np.ndarray:
    """Return the ids of one prompt after the other, [tokens] int32. Raises ProtocolError: the frame is wrong."""
    return _ids("prompts", frames, sum(request.lengths), request.checksum, MAX_ID + 1)


def unpack_answers(request: GenerateRequest, reply: GenerateReply, frames: Sequence[Buffer]) -> list[np.ndarray]:
    """Return the ids of each answer, [R] int32: `n` of one prompt after the other.

    Raises:
        ProtocolError: the frame does not match the header, or an answer is not one that the request asks for.
    """
    n_answers = len(request.lengths) * request.n
    if len(reply.lengths) != n_answers or max(reply.lengths) > request.max_tokens:
        raise ProtocolError(f"{len(reply.lengths)} answers of up to {max(reply.lengths)} tokens, expected {n_answers}")
    ids = _ids("answers", frames, sum(reply.lengths), reply.checksum, request.n_vocab)
    answers = [ids[part] for part in row_slices(reply.lengths)]
    for answer in answers:
        check_end(answer, request.max_tokens, request.stop_ids)
    return answers


def check_end(answer: np.ndarray, max_tokens: int, stop_ids: Sequence[int]) -> None:
    """Raise ProtocolError unless an answer ends with its first stop id, or has none and `max_tokens` tokens."""
    ends = np.flatnonzero(np.isin(answer, stop_ids))
    n_expected = int(ends[0]) + 1 if len(ends) else max_tokens
    if len(answer) != n_expected:
        raise ProtocolError(f"an answer has {len(answer)} tokens, expected {n_expected}: up to its first stop id")


def _ids(name: str, frames: Sequence[Buffer], n: int, expected: int, n_vocab: int) -> np.ndarray:
    if len(frames) != 1 or memoryview(frames[0]).nbytes != 4 * n:
        raise ProtocolError(f"expected one frame with the {n} token ids of the {name}")
    if checksum(frames[0]) != expected:
        raise ProtocolError(f"checksum of the frame of the {name} does not match")
    ids = np.frombuffer(frames[0], "<i4")
    if ids.min() < 0 or ids.max() >= n_vocab:
        raise ProtocolError(f"an id of the {name} is not within [0, {n_vocab})")
    return ids
