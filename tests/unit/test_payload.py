"""Unpacking returns what was packed (bit-exact in fp32 mode) or raises ProtocolError."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from teacher_server.wire.payload import (
    mark_own,
    pack_rows,
    pack_sampled,
    pack_topk,
    rows_per_message,
    unpack_rows,
    unpack_sampled,
    unpack_topk,
)
from teacher_server.wire.protocol import (
    MAX_FRAME_BYTES,
    MAX_ID,
    ProtocolError,
    RowDtype,
    RowsReply,
    ScoreReply,
    Wire,
    checksum,
    replies,
)
from teacher_server.wire.table import NO_ID, TopKTable
from teacher_server.wire.worker_protocol import Assignment
from teacher_server.worker.open_request import UnitMaps, open_request
from tests.service.messages import make_reply, make_request, make_scores, make_tokens

WIRES: list[Wire] = ["fp16", "fp32"]


def exchange(n_rows: int, k: int, wire: Wire, **scores: Any) -> tuple[TopKTable, ScoreReply, list[memoryview]]:
    tokens = np.zeros(n_rows + 1, np.int32)
    request = make_request(tokens, prompt_length=1, k=k, wire=wire, mass=0.9 if scores.get("mass") else 0.0)
    packed = make_scores(n_rows, k, **scores)
    return packed, *make_reply(request, tokens, packed)


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("mass", [False, True], ids=["fixed", "adaptive"])
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (1000, 64), (40_000, 64)], ids=str)
def test_topk_survives_the_wire(wire: Wire, mass: bool, shape: tuple[int, int]) -> None:
    """Fails if planes, frame borders or dtypes differ between the two sides. The last shape needs many frames."""
    scores, reply, frames = exchange(*shape, wire, mass=mass, max_id=MAX_ID)
    assert all(frame.nbytes <= MAX_FRAME_BYTES for frame in frames)
    header = replies.decode(replies.encode(reply))
    assert header == reply and isinstance(header, ScoreReply)
    got = unpack_topk(header, [bytes(frame) for frame in frames])
    np.testing.assert_array_equal(got.ids, scores.ids)
    small = wire == "fp16"
    logprobs = scores.logprobs.astype(np.float16).astype(np.float32) if small else scores.logprobs
    tail = scores.tail.astype(np.float16).astype(np.float32) if small and mass else scores.tail
    np.testing.assert_array_equal(got.logprobs, logprobs)
    np.testing.assert_array_equal(got.tail, tail)
    assert (got.ids.dtype, got.logprobs.dtype, got.tail.dtype) == (np.int32, np.float32, np.float32)
    if mass:
        np.testing.assert_array_equal(got.counts, scores.counts)
        assert ((got.ids == NO_ID) == (np.arange(shape[1]) >= scores.counts[:, None])).all()


@pytest.mark.parametrize("mass", [False, True], ids=["fixed", "adaptive"])
def test_an_entry_is_five_bytes_and_a_position_four_more(mass: bool) -> None:
    """Fails if compact mode needs more than 5 bytes an entry and 4 bytes a position."""
    scores, reply, frames = exchange(1000, 64, "fp16", mass=mass, max_id=MAX_ID)
    assert sum(frame.nbytes for frame in frames) == 5 * reply.n_entries + 4 * 1000
    assert len(replies.encode(reply)) < 400


def test_fp16_clips_instead_of_overflowing() -> None:
    """Fails if the logprob of a very improbable token becomes -inf, which times a probability of 0 is NaN."""
    tokens = np.zeros(2, np.int32)
    scores = TopKTable(np.array([[1, 2]], np.int32), np.array([[0.0, -1e6]], np.float32), np.zeros(1, np.float32))
    reply, frames = make_reply(make_request(tokens, prompt_length=1, k=2), tokens, scores)
    assert unpack_topk(reply, frames).logprobs.tolist() == [[0.0, -65504.0]]


@pytest.mark.parametrize("field", ["ids", "logprobs", "tail", "counts"])
def test_misshapen_scores_are_not_packed(field: str) -> None:
    """Fails if wrong shapes, ids or counts of an engine are sent as a valid message."""
    scores, reply, _ = exchange(6, 8, "fp16", mass=True)
    parts = {name: getattr(scores, name) for name in ("ids", "logprobs", "tail", "counts")}
    for wrong in (parts[field][:-1], np.zeros((0,), np.int32), None):
        if wrong is None and field != "counts":
            continue
        with pytest.raises(ProtocolError):
            pack_topk(TopKTable(**(parts | {field: wrong})), reply)
    with pytest.raises(ProtocolError):
        pack_topk(TopKTable(**(parts | {"ids": scores.ids + MAX_ID + 1})), reply)


def rows_reply(rows: np.ndarray, dtype: RowDtype) -> tuple[RowsReply, list[memoryview]]:
    frames = pack_rows(rows)
    reply = RowsReply(
        request_id=bytes(16),
        token_digest=bytes(16),
        model_fingerprint="f",
        worker="w",
        stream_id=os.urandom(16),
        signal="hidden",
        index=0,
        start=0,
        stop=len(rows),
        n_rows=len(rows),
        n_cols=rows.shape[1],
        dtype=dtype,
        checksums=[checksum(frame) for frame in frames],
        queue_s=0.0,
        compute_s=0.0,
    )
    return reply, frames


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_rows_survive_the_wire(dtype: RowDtype) -> None:
    """Fails if bfloat16 bits are read as float16, or rows are shifted."""
    exact = np.random.default_rng(0).normal(size=(7, 33)).astype(np.float32)
    if dtype == "bfloat16":
        bits = (exact.view(np.uint32) >> 16).astype(np.uint16)
        rows, expected = bits, (bits.astype(np.uint32) << 16).view(np.float32)
    else:
        rows = exact.astype(dtype)
        expected = rows.astype(np.float32)
    reply, frames = rows_reply(rows, dtype)
    np.testing.assert_array_equal(unpack_rows(reply, frames), expected)
    rows = rows.copy()
    rows[2, 3] = 0x7FC0 if dtype == "bfloat16" else np.nan
    with pytest.raises(ProtocolError, match="rows 0:"):
        unpack_rows(*rows_reply(rows, dtype))


def test_a_row_larger_than_a_frame_is_refused() -> None:
    """Fails if a huge vocabulary causes a division by zero, or frames that the other side refuses."""
    assert rows_per_message(152_000, "float32") == 6
    with pytest.raises(ProtocolError):
        rows_per_message(MAX_ID, "float32")


def test_sampled_survives_the_wire() -> None:
    """Fails if sampled logprobs are rounded: they are exact in both modes."""
    logprobs = -np.random.default_rng(0).exponential(size=30).astype(np.float32)
    tokens = make_tokens()
    reply, _ = make_reply(make_request(tokens), tokens)
    reply = ScoreReply(
        **{f: getattr(reply, f) for f in reply.__struct_fields__} | {"signal": "sampled", "k": 0, "n_entries": 0}
    )
    frames = pack_sampled(logprobs, reply)
    reply.checksums = [checksum(frame) for frame in frames]
    np.testing.assert_array_equal(unpack_sampled(reply, frames), logprobs)
    with pytest.raises(ProtocolError):
        pack_sampled(logprobs[:-1], reply)


@settings(max_examples=200)
@given(data=st.data())
def test_marks_return_the_mask_or_are_refused(data: st.DataObject) -> None:
    """Fails if a worker reads other ids or another mask than the client gave, or accepts a damaged one."""
    sizes = data.draw(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 6)), min_size=1, max_size=3))
    ids = [make_tokens(p + r, i) for i, (p, r) in enumerate(sizes)]
    masks = [np.array(data.draw(st.lists(st.booleans(), min_size=r, max_size=r))) for _, r in sizes]
    n_own, n_response = sum(int(mask.sum()) for mask in masks), sum(r for _, r in sizes)
    marks = [np.append(np.ones(p, bool), mask) for mask, (p, _) in zip(masks, sizes, strict=True)]
    frame = np.concatenate([mark_own(tokens, own) for tokens, own in zip(ids, marks, strict=True)])
    assume(n_own)  # the client refuses a request without rows; in a header 0 stands for all
    is_whole, good = n_own == n_response, all(mask.any() for mask in masks)
    damaged = data.draw(st.sampled_from([None, *range(len(frame))]))
    if damaged is not None:
        frame[damaged] = ~frame[damaged]
    own = {"n_own": 0 if is_whole else n_own, "lengths": [(p, p + r) for p, r in sizes] if len(sizes) > 1 else []}
    job = Assignment(job_id=bytes(16), stream_id=bytes(16), waited_s=0.0, remaining_s=1.0)
    try:
        request = make_request(frame, prompt_length=len(frame) - n_response, signal="sampled", **own)
        _, sequences = open_request(job, request, [frame.tobytes()], 0.0, UnitMaps())
    except (ProtocolError, ValueError):
        assert damaged is not None or not good
        return
    assert damaged is None and good
    for sequence, tokens, mask, (p, _) in zip(sequences, ids, masks, sizes, strict=True):
        np.testing.assert_array_equal(sequence.token_ids, tokens)
        np.testing.assert_array_equal(sequence.rows, np.flatnonzero(mask))
        np.testing.assert_array_equal(sequence.own_ids, tokens[p:][mask])
        assert (sequence.own is None) == is_whole and sequence.n_rows == mask.sum()
