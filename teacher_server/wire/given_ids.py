"""Pack, check and unpack the ids that a client gives with a `topk` request: [R, G] ids, one row for each of the reply.

They follow the token frame as two planes, the low 16 and the high 8 bits of each id: 3 bytes an id.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from teacher_server.wire.payload import Plane, check_frames, cut_planes, join_planes
from teacher_server.wire.protocol import Buffer, ScoreRequest


def given_planes(request: ScoreRequest) -> list[Plane]:
    """Return the planes in the frames after the token ids; none without given ids."""
    n_items = request.n_rows * request.n_given
    return [Plane("low", "<u2", n_items), Plane("high", "u1", n_items)]


def pack_given(ids: np.ndarray) -> list[memoryview]:
    """Return the frames of [R, G] ids that `given_problem` accepts."""
    planes = [Plane("low", "<u2", ids.size), Plane("high", "u1", ids.size)]
    return cut_planes(planes, {"low": ids & 0xFFFF, "high": ids >> 16})


def unpack_given(request: ScoreRequest, frames: Sequence[Buffer]) -> np.ndarray | None:
    """Return [R, G] int32; None without given ids. Raises ProtocolError if the frames do not match the header.

    Args:
        frames: those after the token ids.
    """
    planes = given_planes(request)
    check_frames(planes, frames, request.given_checksums)
    if not request.n_given:
        return None
    arrays = join_planes(planes, frames)
    ids = arrays["low"].astype(np.int32) | arrays["high"].astype(np.int32) << 16
    return ids.reshape(request.n_rows, request.n_given)


def given_problem(ids: np.ndarray, n_rows: int, n_vocab: int) -> str:
    """Return why [R, G] ids cannot be given for R = n_rows rows; empty means they can."""
    if ids.ndim != 2 or len(ids) != n_rows or not ids.size or not np.issubdtype(ids.dtype, np.integer):
        return f"given ids are {ids.dtype} {list(ids.shape)}, expected integers [{n_rows}, 1 or more]"
    outside = (ids < 0) | (ids >= n_vocab)
    if outside.any():
        row, column = np.argwhere(outside)[0]
        return f"given id {ids[row, column]} of row {row} is not within [0, {n_vocab})"
    ordered = np.sort(ids, axis=1)
    twice = ordered[:, 1:] == ordered[:, :-1]
    if twice.any():
        row, column = np.argwhere(twice)[0]
        return f"id {ordered[row, column]} is given twice in row {row}"
    return ""


def listed_problem(given: np.ndarray, listed: np.ndarray) -> str:
    """Return which id of [R, G] given ids its row of [R, K] listed ids lacks; empty means it lacks none."""
    # One flat search: adding a multiple of the row number keeps the sorted rows ascending across rows.
    start = np.arange(len(listed), dtype=np.int64)[:, None] << 32
    known, wanted = (np.sort(listed, axis=1) + start).ravel(), given + start
    found = known[np.minimum(np.searchsorted(known, wanted), len(known) - 1)] == wanted
    if found.all():
        return ""
    row, column = np.argwhere(~found)[0]
    return f"row {row} does not list the given id {given[row, column]}"
