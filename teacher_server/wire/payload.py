"""Pack, check and unpack the raw frames of a message: token ids, score planes, rows of a matrix.

An array is sent as flat little-endian planes, each split into frames of at most 4 MiB:

    topk     logprobs [E], ids [E], tail [R]; with a mass target also counts [R], and E = sum of counts, else R * K;
             and, if requested, sampled [R]
    sampled  logprobs [R]
    rows     [rows, columns], one frame

The ids that a client gives with a `topk` request, [R, G], follow the token frame as two planes, the low 16 and the high
8 bits of each id: 3 bytes an id. The map of units, [V], is one int32 plane there.

In fp16 mode an entry is 5 bytes: a float16 logprob (KL error 8e-5 on average) and an id as a uint16
and a uint8 plane; `tail` and `counts` add at most 4 bytes a position. fp32 mode is lossless.

Letters: P prompt tokens, R response tokens, K top-k entries, G given ids, E entries of a reply, C columns. In replies,
R counts the response tokens that have rows: all, or those of a request with `n_own`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from teacher_server.wire.protocol import (
    MAX_FRAME_BYTES,
    MAX_ID,
    MAX_TOKENS,
    Buffer,
    ProtocolError,
    RowDtype,
    RowsReply,
    ScoreReply,
    ScoreRequest,
    as_frame,
    checksum,
    replies,
    token_digest,
)
from teacher_server.wire.table import NO_ID, TopKTable

_MIN_FP16 = -65504.0
# numpy has no bfloat16, so its bits are sent as uint16.
WIRE_DTYPES: dict[RowDtype, str] = {"float16": "<f2", "bfloat16": "<u2", "float32": "<f4"}
# float16 -> float32 by a table of all 65536 values: about three times as fast as numpy's cast.
_HALF = np.arange(1 << 16, dtype=np.uint16).view("<f2").astype(np.float32)
# Dtype -> (integer dtype, exponent bits). A number whose exponent bits are all 1 is an infinity or a NaN.
_EXPONENT = {"<f2": ("<u2", 0x7C00), "<u2": ("<u2", 0x7F80), "<f4": ("<u4", 0x7F800000)}


class Plane(NamedTuple):
    name: str
    dtype: str
    n_items: int
    is_float: bool = False


# Token ids


def check_tokens(token_ids: np.ndarray) -> np.ndarray:
    """Return [P + R] contiguous little-endian int32. Raises ProtocolError on ids outside [0, 2^24)."""
    if token_ids.ndim != 1 or not 2 <= token_ids.size <= MAX_TOKENS:
        raise ProtocolError(f"token ids of shape {token_ids.shape}, expected one row of 2 to {MAX_TOKENS}")
    if token_ids.min() < 0 or token_ids.max() > MAX_ID:
        raise ProtocolError(f"token ids {token_ids.min()} to {token_ids.max()} are not within [0, {MAX_ID}]")
    return np.ascontiguousarray(token_ids, dtype="<i4")


def mark_own(token_ids: np.ndarray, is_own: np.ndarray | None) -> np.ndarray:
    """Return ids as they are sent: one without a row as its bitwise complement, a negative number.

    Args:
        token_ids: [R] signed integers.
        is_own: [R] bool, the ids that have rows; None means all.
    """
    return token_ids if is_own is None else np.where(is_own, token_ids, ~token_ids)


def unmarked(token_ids: np.ndarray) -> np.ndarray:
    """Return the int32 ids in which `mark_own` has complemented some."""
    return token_ids ^ (token_ids >> 31)


def unpack_tokens(request: ScoreRequest, frames: Sequence[Buffer]) -> np.ndarray:
    """Return [P + R] int32 with the marks of `mark_own`, a view of the frame. Raises ProtocolError: it is damaged."""
    if len(frames) != 1 or memoryview(frames[0]).nbytes != 4 * request.total_length:
        raise ProtocolError(f"expected one frame of {request.total_length} token ids")
    if checksum(frames[0]) != request.checksum:
        raise ProtocolError("token frame checksum does not match")
    tokens = np.frombuffer(frames[0], dtype="<i4")
    check_tokens(unmarked(tokens) if request.n_own else tokens)
    if request.n_own:
        _check_marks(request, tokens >= 0)
    return tokens


def _check_marks(request: ScoreRequest, is_own: np.ndarray) -> None:
    """Raise ProtocolError unless all prompt tokens and `n_own` response tokens are own, at least one of a sequence."""
    start = 0
    for n_prompt, n_total in request.sequences:
        if not is_own[start : start + n_prompt].all():
            raise ProtocolError("a prompt token is marked as one without a row")
        if not is_own[start + n_prompt : start + n_total].any():
            raise ProtocolError("a sequence has no rows")
        start += n_total
    if (n_own := np.count_nonzero(is_own) - request.prompt_length) != request.n_own:
        raise ProtocolError(f"{n_own} response tokens have rows, but {request.n_own} in the header")


# Planes and frames


def score_planes(reply: ScoreReply) -> list[Plane]:
    """Return the planes in the frames of `reply`, in order."""
    if reply.signal == "sampled":
        return [Plane("logprobs", "<f4", reply.n_rows, is_float=True)]
    small = reply.wire == "fp16"
    planes = [Plane("logprobs", "<f2" if small else "<f4", reply.n_entries, is_float=True)]
    if small:
        planes += [Plane("low", "<u2", reply.n_entries), Plane("high", "u1", reply.n_entries)]
    else:
        planes += [Plane("ids", "<i4", reply.n_entries)]
    # The tail is float16 if there are counts (2 bytes), so that both use 4 bytes a position.
    planes += [Plane("tail", "<f2" if small and reply.adaptive else "<f4", reply.n_rows, is_float=True)]
    if reply.adaptive:
        planes += [Plane("counts", "<u2", reply.n_rows)]  # less one, so that 65536 fits
    if reply.with_sampled:
        planes += [Plane("sampled", "<f4", reply.n_rows, is_float=True)]
    return planes


def rows_planes(reply: RowsReply) -> list[Plane]:
    """Return one plane of rows x columns."""
    return [Plane("rows", WIRE_DTYPES[reply.dtype], (reply.stop - reply.start) * reply.n_cols, is_float=True)]


def rows_per_message(n_cols: int, dtype: RowDtype) -> int:
    """Return how many rows of a matrix fit into one frame. Raises ProtocolError if one row does not fit."""
    n_rows = MAX_FRAME_BYTES // (n_cols * np.dtype(WIRE_DTYPES[dtype]).itemsize)
    if n_rows == 0:
        raise ProtocolError(f"a row of {n_cols} {dtype} numbers does not fit a frame of {MAX_FRAME_BYTES} bytes")
    return n_rows


def _frame_plan(planes: Sequence[Plane]) -> Iterator[tuple[Plane, int, int]]:
    """Yield (plane, first item, end item) of each frame, in order; the same on both sides."""
    for plane in planes:
        step = MAX_FRAME_BYTES // np.dtype(plane.dtype).itemsize
        for start in range(0, plane.n_items, step):
            yield plane, start, min(start + step, plane.n_items)


def cut_planes(planes: Sequence[Plane], arrays: Mapping[str, np.ndarray]) -> list[memoryview]:
    """Convert arrays to the dtypes of their planes, and split them into frames. Values must fit the dtypes."""
    return [
        as_frame(np.ascontiguousarray(arrays[plane.name].reshape(-1)[start:stop], dtype=plane.dtype))
        for plane, start, stop in _frame_plan(planes)
    ]


def split_frames(planes: Sequence[Plane], data: memoryview) -> list[memoryview]:
    """Return the frames of `cut_planes` that lie in `data` one after the other; the last may be too short or long."""
    sizes = [(stop - start) * np.dtype(plane.dtype).itemsize for plane, start, stop in _frame_plan(planes)]
    ends = [*itertools.accumulate(sizes[:-1]), len(data)]
    return [data[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def check_frames(planes: Sequence[Plane], frames: Sequence[Buffer], checksums: Sequence[int]) -> None:
    """Check sizes and checksums, and that all floats are finite. Allocates little memory. Raises ProtocolError."""
    plan = list(_frame_plan(planes))
    if not len(frames) == len(checksums) == len(plan):
        raise ProtocolError(f"{len(frames)} frames, {len(checksums)} checksums, expected {len(plan)}")
    for (plane, start, stop), frame, expected in zip(plan, frames, checksums, strict=True):
        n_bytes = (stop - start) * np.dtype(plane.dtype).itemsize
        if memoryview(frame).nbytes != n_bytes:
            raise ProtocolError(f"the frame of {plane.name} {start}:{stop} does not have {n_bytes} bytes")
        if checksum(frame) != expected:
            raise ProtocolError(f"checksum of the frame of {plane.name} {start}:{stop} does not match")
        if plane.is_float:
            integer, bits = _EXPONENT[plane.dtype]
            if ((np.frombuffer(frame, integer) & bits) == bits).any():
                raise ProtocolError(f"a NaN or an infinity in {plane.name} {start}:{stop}")


def check_reply(reply: ScoreReply | RowsReply, frames: Sequence[Buffer]) -> None:
    """Run `check_frames` on either kind of reply."""
    planes = score_planes(reply) if isinstance(reply, ScoreReply) else rows_planes(reply)
    check_frames(planes, frames, reply.checksums)


def check_scores(reply: ScoreReply, frames: Sequence[Buffer], n_vocab: int) -> None:
    """Raise ProtocolError if a probability exceeds 1, or an id is not below `n_vocab`. Call `check_frames` first.

    Floats are compared as signed integers of the same bits, which have the same order here: ten times as fast.
    """
    arrays = join_planes(score_planes(reply), frames)
    as_int = {name: a.view(f"<i{a.itemsize}") for name, a in arrays.items() if name in ("logprobs", "tail", "sampled")}
    if max(as_int[name].max() for name in ("logprobs", "sampled") if name in as_int) > 0:
        raise ProtocolError("a logprob is above 0")
    if reply.signal == "sampled":
        return
    one = 0x3C00 if arrays["tail"].itemsize == 2 else 0x3F800000
    if as_int["tail"].min() < 0 or as_int["tail"].max() > one:
        raise ProtocolError("a tail is not within [0, 1]")
    last = n_vocab - 1
    if reply.wire == "fp32":
        outside = arrays["ids"].min() < 0 or arrays["ids"].max() > last
    else:
        highest = int(arrays["high"].max())
        outside = highest > last >> 16 or (
            highest == last >> 16 and arrays["low"][arrays["high"] == highest].max() > last & 0xFFFF
        )
    if outside:
        raise ProtocolError(f"an id is not below n_vocab = {n_vocab}")
    if reply.adaptive:
        counts = arrays["counts"]
        if counts.max() >= reply.k or int(counts.sum(dtype=np.int64)) + reply.n_rows != reply.n_entries:
            raise ProtocolError(f"counts do not add up to {reply.n_entries}")


def join_planes(planes: Sequence[Plane], frames: Sequence[Buffer]) -> dict[str, np.ndarray]:
    """Join frames into flat arrays; read-only views where a plane is one frame. Call `check_frames` first."""
    chunks: dict[str, list[np.ndarray]] = {plane.name: [] for plane in planes}
    for (plane, _, _), frame in zip(_frame_plan(planes), frames, strict=True):
        chunks[plane.name].append(np.frombuffer(frame, plane.dtype))
    return {name: part[0] if len(part) == 1 else np.concatenate(part) for name, part in chunks.items()}


# Scores


def pack_topk(scores: TopKTable, reply: ScoreReply) -> list[memoryview]:
    """Return the frames of a top-k reply. Raises ProtocolError on bad shapes, ids or counts."""
    ids = scores.ids
    logprobs = scores.logprobs
    tail = scores.tail
    counts = scores.counts
    if ids.shape != (reply.n_rows, reply.k) or logprobs.shape != ids.shape or tail.shape != (reply.n_rows,):
        raise ProtocolError(f"ids {ids.shape}, logprobs {logprobs.shape}, tail {tail.shape} are not one [R, K]")
    if (counts is not None) != reply.adaptive:
        raise ProtocolError("counts must be given with a mass target, and only then")
    if (scores.sampled is not None) != reply.with_sampled:
        raise ProtocolError("logprobs of the response tokens must be given if they were requested, and only then")
    arrays: dict[str, np.ndarray] = {"tail": tail}
    if scores.sampled is not None:
        if scores.sampled.shape != tail.shape:
            raise ProtocolError(f"sampled {scores.sampled.shape} is not [{reply.n_rows}]")
        arrays["sampled"] = scores.sampled
    if counts is not None:
        if counts.shape != tail.shape or counts.min() < 1 or counts.max() > reply.k:
            raise ProtocolError(f"counts are not {reply.n_rows} numbers within 1 to {reply.k}")
        kept = np.arange(reply.k) < counts[:, None]  # [R, K]
        ids = ids[kept]
        logprobs = logprobs[kept]
        arrays["counts"] = counts - 1
    if ids.size != reply.n_entries:
        raise ProtocolError(f"{ids.size} entries, but {reply.n_entries} in the header")
    if ids.min() < 0 or ids.max() > MAX_ID:
        raise ProtocolError(f"top-k ids {ids.min()} to {ids.max()} are not within [0, {MAX_ID}]")
    if reply.wire == "fp16":
        # exp() is 0 below float16's range in any case; without the clip the cast would give -inf.
        arrays |= {"logprobs": np.maximum(logprobs, _MIN_FP16), "low": ids & 0xFFFF, "high": ids >> 16}
    else:
        arrays |= {"logprobs": logprobs, "ids": ids}
    return cut_planes(score_planes(reply), arrays)


def unpack_topk(reply: ScoreReply, frames: Sequence[Buffer]) -> TopKTable:
    """Unpack a top-k reply. Raises ProtocolError on any damage, before allocating large arrays."""
    planes = score_planes(reply)
    check_frames(planes, frames, reply.checksums)
    arrays = join_planes(planes, frames)
    if reply.wire == "fp16":
        logprobs = np.take(_HALF, arrays["logprobs"].view("<u2"))
        ids = arrays["low"].astype(np.int32)
        ids |= arrays["high"].astype(np.int32) << 16
    else:
        logprobs = arrays["logprobs"].astype(np.float32)
        ids = arrays["ids"].astype(np.int32)
        if ids.min() < 0 or ids.max() > MAX_ID:
            raise ProtocolError(f"top-k ids {ids.min()} to {ids.max()} are not within [0, {MAX_ID}]")
    tail = arrays["tail"].astype(np.float32)
    sampled = arrays["sampled"].astype(np.float32) if reply.with_sampled else None
    shape = (reply.n_rows, reply.k)
    if not reply.adaptive:
        return TopKTable(ids.reshape(shape), logprobs.reshape(shape), tail, None, sampled)
    counts = arrays["counts"].astype(np.int32) + 1
    if counts.max() > reply.k or int(counts.sum()) != reply.n_entries:
        raise ProtocolError(f"counts up to {counts.max()} with sum {counts.sum()}, expected {reply.n_entries}")
    kept = np.arange(reply.k) < counts[:, None]
    all_ids = np.full(shape, NO_ID, np.int32)
    all_logprobs = np.full(shape, -np.inf, np.float32)
    all_ids[kept] = ids
    all_logprobs[kept] = logprobs
    return TopKTable(all_ids, all_logprobs, tail, counts, sampled)


def pack_sampled(logprobs: np.ndarray, reply: ScoreReply) -> list[memoryview]:
    """Pack [R] float32 logprobs into frames; float32 in both modes. Raises ProtocolError on a bad shape."""
    if logprobs.shape != (reply.n_rows,):
        raise ProtocolError(f"logprobs {logprobs.shape} are not [{reply.n_rows}]")
    return cut_planes(score_planes(reply), {"logprobs": logprobs})


def unpack_sampled(reply: ScoreReply, frames: Sequence[Buffer]) -> np.ndarray:
    """Return [R] float32, a copy. Raises ProtocolError on any damage."""
    planes = score_planes(reply)
    check_frames(planes, frames, reply.checksums)
    return join_planes(planes, frames)["logprobs"].astype(np.float32)


def pack_rows(rows: np.ndarray) -> list[memoryview]:
    """Return the one frame of a RowsReply from [rows, C] of a `WIRE_DTYPES` dtype; no copy if contiguous."""
    return [as_frame(np.ascontiguousarray(rows))]


def unpack_rows(reply: RowsReply, frames: Sequence[Buffer]) -> np.ndarray:
    """Return [rows, C] float32 (a read-only view if sent as float32). Raises ProtocolError on any damage."""
    planes = rows_planes(reply)
    check_frames(planes, frames, reply.checksums)
    rows = join_planes(planes, frames)["rows"].reshape(reply.stop - reply.start, reply.n_cols)
    if reply.dtype == "bfloat16":
        return (rows.astype(np.uint32) << 16).view(np.float32)
    return rows.astype(np.float32, copy=False)


def given_planes(request: ScoreRequest) -> list[Plane]:
    """Return the planes in the frames after the token ids; none without given ids or a map of units."""
    images = [Plane(f"image {i}", "u1", size) for i, size in enumerate(request.image_sizes)]
    if request.n_mapped:
        return [Plane("units", "<i4", request.n_mapped), *images]
    n_items = request.n_rows * request.n_given
    planes_of_ids = [Plane("low", "<u2", n_items), Plane("high", "u1", n_items)] if n_items else []
    return [*planes_of_ids, *images]


def pack_images(images: Sequence[bytes]) -> list[memoryview]:
    """Return the frames of encoded images."""
    planes = [Plane(f"image {i}", "u1", len(image)) for i, image in enumerate(images)]
    return cut_planes(planes, {f"image {i}": np.frombuffer(image, np.uint8) for i, image in enumerate(images)})


def unpack_images(request: ScoreRequest, frames: Sequence[Buffer]) -> list[np.ndarray]:
    """Return the distinct encoded images of a request, uint8; views of the frames, unless an image has several.

    Args:
        frames: those after the token ids, which `check_frames` has checked.
    """
    arrays = join_planes(given_planes(request), frames) if request.image_sizes else {}
    return [arrays[f"image {i}"] for i in range(len(request.image_sizes))]


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


def pack_units(units: np.ndarray) -> list[memoryview]:
    """Return the frames of a map of units, [V] int32."""
    return cut_planes([Plane("units", "<i4", len(units))], {"units": units})


def unpack_units(request: ScoreRequest, frames: Sequence[Buffer]) -> np.ndarray | None:
    """Return the map of units of a request, [n_mapped] int32; None if it has none.

    Args:
        frames: those after the token ids, which `unpack_given` has checked.

    Raises:
        ProtocolError: the map has another digest, or a unit that is not within [0, n_vocab).
    """
    if not request.n_mapped:
        return None
    units = join_planes(given_planes(request), frames)["units"]
    if token_digest(units) != request.units:
        raise ProtocolError("the map of units has another digest")
    if units.min() < 0 or units.max() >= request.n_vocab:
        raise ProtocolError(f"units {units.min()} to {units.max()} are not within [0, {request.n_vocab})")
    return units


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


def listed_problem(given_ids: np.ndarray, listed: np.ndarray) -> str:
    """Return which id of [R, G] given ids its row of [R, K] listed ids lacks; empty means it lacks none."""
    # One flat search: adding a multiple of the row number keeps the sorted rows ascending across rows.
    start = np.arange(len(listed), dtype=np.int64)[:, None] << 32
    listed_keys = (np.sort(listed, axis=1) + start).ravel()
    wanted = given_ids + start
    is_listed = listed_keys[np.minimum(np.searchsorted(listed_keys, wanted), len(listed_keys) - 1)] == wanted
    if is_listed.all():
        return ""
    row, column = np.argwhere(~is_listed)[0]
    return f"row {row} does not list the given id {given_ids[row, column]}"


def as_message(reply: ScoreReply, frames: Sequence[Buffer]) -> bytes:
    """Return a reply as bytes: the number of frames and their sizes as little-endian uint32, then the frames."""
    buffers = [replies.encode(reply), *frames]
    sizes = np.array([len(buffers), *(memoryview(part).nbytes for part in buffers)], "<u4")
    return b"".join([sizes.tobytes(), *buffers])


def read_messages(body: Buffer) -> list[tuple[ScoreReply, list[Buffer]]]:
    """Return the replies of `as_message` in a body, for `unpack_topk`. Raises ProtocolError, ValueError: damage."""
    messages: list[tuple[ScoreReply, list[Buffer]]] = []
    at = 0
    body = memoryview(body)
    while at < body.nbytes:
        n_frames = int(np.frombuffer(body, "<u4", 1, at)[0])
        sizes = np.frombuffer(body, "<u4", n_frames, at + 4).tolist()
        at += 4 * (1 + n_frames)
        frames = [body[at + end - size : at + end] for size, end in zip(sizes, np.cumsum(sizes).tolist(), strict=True)]
        at += sum(sizes)
        header = replies.decode(frames[0])
        if isinstance(header, ScoreReply):
            messages.append((header, [*frames[1:]]))
    return messages
