"""Decode fuzzed messages: each one must give a ProtocolError or a valid message.

A message is one byte string, `(length, bytes)...`, so that a coverage-guided fuzzer can extend it. Header and
frame checksums are corrected after a mutation (unless disabled); otherwise every mutation would fail at the
first comparison.
"""

from __future__ import annotations

import contextlib
import struct
from typing import Any

import msgspec
import numpy as np

from teacher_server.wire.payload import (
    TopKScores,
    check_reply,
    given_problem,
    pack_given,
    pack_sampled,
    pack_topk,
    pack_units,
    unmarked,
    unpack_given,
    unpack_rows,
    unpack_sampled,
    unpack_tokens,
    unpack_topk,
    unpack_units,
)
from teacher_server.wire.protocol import (
    BODY_AT,
    Cancel,
    DrainReply,
    DrainRequest,
    ErrorReply,
    HeadRequest,
    InfoRequest,
    Ping,
    Pong,
    ProtocolError,
    Received,
    RowsReply,
    ScoreReply,
    ScoreRequest,
    StatusReply,
    StatusRequest,
    as_frame,
    checksum,
    replies,
    requests,
    seal,
    token_digest,
)
from teacher_server.wire.status import Gpu, ServerStatus, TeacherStatus, WorkerStatus, decode_status, encode_status
from teacher_server.wire.worker_protocol import (
    Assignment,
    Dismiss,
    Done,
    JobCancel,
    JobReceived,
    Part,
    from_worker,
    to_worker,
)
from tests.service.messages import make_hello, make_reply, make_request, make_tokens

_CODECS = (requests, replies, from_worker, to_worker)
Message = list[bytes]


def corpus() -> list[Message]:
    """Return a valid message of every kind; headers without magic, version and checksum."""
    tokens = make_tokens(12)
    some_id = bytes(range(16))
    messages: list[tuple[Any, list[Any]]] = [
        (make_request(tokens, request_id=some_id), [as_frame(tokens)]),
        (make_request(tokens, request_id=some_id, signal="logits"), [as_frame(tokens)]),
        (HeadRequest(request_id=some_id, wire="fp16", deadline_s=1.0), []),
        (Received(request_id=some_id, stream_id=some_id, n_messages=3), []),
        (Cancel(request_id=some_id), []),
        (InfoRequest(request_id=some_id, teacher="math"), []),
        (StatusRequest(request_id=some_id), []),
        (DrainRequest(request_id=some_id, worker="w"), []),
        (Ping(), []),
        (Pong(epoch=some_id, n_workers=1, n_queued=2), []),
        (DrainReply(request_id=some_id, n_left=1), []),
        (ErrorReply(request_id=some_id, code="busy", text="full", retry_after_s=0.2), []),
        (make_hello(gpus=[Gpu("0", "GPU-1", "x")]), []),
        (Assignment(job_id=some_id, stream_id=some_id, waited_s=1.0, remaining_s=2.0), []),
        (Done(job_id=some_id), []),
        (Part(job_id=some_id), []),
        (JobReceived(job_id=some_id, stream_id=some_id, n_messages=1), []),
        (JobCancel(job_id=some_id), []),
        (Dismiss(why="NaN"), []),
    ]
    ids = np.array([[3, 1 << 20, 0], [7, 5, 6]], np.int32)
    given = make_request(tokens, request_id=some_id, n_given=3, given_checksums=checksums(pack_given(ids)))
    messages.append((given, [as_frame(tokens), *pack_given(ids)]))
    units = np.arange(5, dtype=np.int32) % 3
    mapped = {"n_mapped": 5, "given_checksums": checksums(pack_units(units)), "units": token_digest(units)}
    listed = make_request(tokens, request_id=some_id, k=2, n_vocab=3, **mapped)
    messages.append((listed, [as_frame(tokens), *pack_units(units)]))
    several = make_request(tokens, request_id=some_id, prompt_length=5, lengths=[(2, 5), (3, 7)])
    messages.append((several, [as_frame(tokens)]))
    marked = np.where(np.arange(12) % 4 == 2, ~tokens, tokens)
    messages.append((make_request(marked, request_id=some_id, prompt_length=2, n_own=7), [as_frame(marked)]))
    spans = make_request(marked, request_id=some_id, prompt_length=3, lengths=[(2, 5), (1, 7)], n_own=6)
    messages.append((spans, [as_frame(marked)]))
    for wire in ("fp16", "fp32"):
        mixed = make_request(tokens, request_id=some_id, k=3, wire=wire, with_sampled=True)
        messages.append(make_reply(mixed, tokens))
        for mass in (0.0, 0.9):
            messages.append(make_reply(make_request(tokens, request_id=some_id, k=3, wire=wire, mass=mass), tokens))
    sampled, _ = make_reply(make_request(tokens), tokens)
    sampled.signal, sampled.k, sampled.n_entries = "sampled", 0, 0
    messages.append((sampled, pack_sampled(np.zeros(sampled.n_rows, np.float32), sampled)))
    for dtype, numpy_dtype in (("float16", "<f2"), ("bfloat16", "<u2"), ("float32", "<f4")):
        rows = np.ones((3, 4), numpy_dtype)
        reply = _rows_reply(some_id, rows, dtype)
        messages.append((reply, [as_frame(rows)]))
    encoded = [[msgspec.msgpack.encode(header), *(bytes(frame) for frame in frames)] for header, frames in messages]
    header, frame = encode_status(some_id, _status())
    return [*encoded, [header[BODY_AT:], frame]]


def checksums(frames: list[Any]) -> list[int]:
    return [checksum(frame) for frame in frames]


def _rows_reply(some_id: bytes, rows: np.ndarray, dtype: Any) -> RowsReply:
    return RowsReply(
        request_id=some_id,
        token_digest=some_id,
        model_fingerprint="f",
        worker="w",
        stream_id=some_id,
        signal="hidden",
        index=0,
        start=0,
        stop=len(rows),
        n_rows=len(rows),
        n_cols=rows.shape[1],
        dtype=dtype,
        checksums=[],
        queue_s=0.0,
        compute_s=0.0,
    )


def _status() -> ServerStatus:
    worker = WorkerStatus(
        name="w",
        teacher="",
        state="ready",
        host="h",
        pid=1,
        engine="hf",
        device="cpu",
        dtype="float32",
        gpus=[Gpu("0")],
        n_in_flight=0,
        tokens_in_flight=0,
        n_done=0,
        n_tokens=0,
        tokens_per_s=0.0,
        queue_s=0.0,
        compute_s=0.0,
        last_heard_s=0.0,
    )
    teacher = TeacherStatus(
        name="",
        model_name="m",
        model_path="/m",
        model_fingerprint="f",
        tokenizer_fingerprint="t",
        n_queued=0,
        n_workers=1,
    )
    return ServerStatus(
        epoch="e",
        uptime_s=1.0,
        draining=False,
        n_queued=0,
        queued_bytes=0,
        n_answered=0,
        n_errors={"busy": 1},
        n_retried=0,
        n_lost_workers=0,
        excluded={},
        teachers=[teacher],
        workers=[worker],
    )


def join(message: Message) -> bytes:
    """Join a message into one byte string. `split` is the inverse."""
    return b"".join(struct.pack("<H", len(part) & 0xFFFF) + part for part in message)


def split(data: bytes) -> Message:
    """Split a byte string into a message. Every byte string is valid input."""
    message, at = [], 0
    while at + 2 <= len(data) and len(message) < 8:
        (length,) = struct.unpack_from("<H", data, at)
        message.append(data[at + 2 : at + 2 + length])
        at += 2 + length
    return message


def check(message: Message, *, correct_checksums: bool = True) -> bool:
    """Decode a message with every codec. Returns whether one of them found it valid.

    Raises:
        AssertionError or another exception except ProtocolError: on a bug of the decoder.
    """
    if not message:
        return False
    for codec in _CODECS:
        with contextlib.suppress(ProtocolError):
            codec.decode(message[0])  # unmodified: magic, version and checksum may be damaged
    body, frames = message[0], message[1:]
    sealed = seal(body)
    valid = False
    for codec in _CODECS:
        try:
            header: Any = codec.decode(sealed)
        except ProtocolError:
            continue
        assert codec.decode(codec.encode(header)) == header, "decoding the encoded header gave another header"
        if correct_checksums and hasattr(header, "checksums"):
            header.checksums = [checksum(frame) for frame in frames]
        if correct_checksums and isinstance(header, ScoreRequest) and frames:
            header.checksum = checksum(frames[0])
            header.given_checksums = [checksum(frame) for frame in frames[1:]]
            header.units = token_digest(b"".join(frames[1:])) if header.n_mapped else header.units
        try:
            _decode_frames(header, frames)
        except ProtocolError:
            continue
        valid = True
    return valid


def _decode_frames(header: Any, frames: Message) -> None:
    if isinstance(header, ScoreRequest):
        tokens, given = unpack_tokens(header, frames[:1]), unpack_given(header, frames[1:])
        assert tokens.shape == (header.total_length,) and unmarked(tokens).min() >= 0
        assert np.count_nonzero(tokens >= 0) == header.prompt_length + header.n_rows
        assert sum(total - prompt for prompt, total in header.sequences) == header.n_response
        assert (given is None) == (header.n_given == 0 or header.n_mapped > 0)
        if (units := unpack_units(header, frames[1:])) is not None:
            assert len(units) == header.n_mapped and 0 <= units.min() <= units.max() < header.n_vocab
        if given is not None:
            assert given.shape == (header.n_rows, header.n_given) and given.min() >= 0
            assert isinstance(given_problem(given, header.n_rows, header.n_vocab or 50), str)
            assert [bytes(frame) for frame in pack_given(given)] == list(frames[1:])
    elif isinstance(header, StatusReply):
        assert isinstance(decode_status(header, list(frames)), ServerStatus)
    elif isinstance(header, RowsReply):
        rows = unpack_rows(header, frames)
        assert rows.shape == (header.stop - header.start, header.n_cols) and np.isfinite(rows).all()
    elif isinstance(header, ScoreReply):
        check_reply(header, frames)
        if header.signal == "sampled":
            assert np.isfinite(unpack_sampled(header, frames)).all()
        else:
            _check_topk(header, unpack_topk(header, frames))


def _check_topk(header: ScoreReply, scores: TopKScores) -> None:
    assert scores.ids.shape == scores.logprobs.shape == (header.n_rows, header.k)
    listed = scores.ids >= 0
    assert np.isfinite(scores.logprobs[listed]).all() and np.isneginf(scores.logprobs[~listed]).all()
    assert np.isfinite(scores.tail).all() and scores.tail.shape == (header.n_rows,)
    assert int(listed.sum()) == header.n_entries
    assert (scores.sampled is not None) == header.with_sampled
    assert pack_topk(scores, header) is not None
