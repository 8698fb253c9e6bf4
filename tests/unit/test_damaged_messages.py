"""Damaged messages of every kind: each one is refused with ProtocolError, or it decodes to a valid message."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from teacher_server.wire.payload import (
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
    Codec,
    ErrorReply,
    HeadRequest,
    InfoRequest,
    Pong,
    ProtocolError,
    Received,
    RowsReply,
    ScoreReply,
    ScoreRequest,
    StatusReply,
    as_frame,
    checksum,
    replies,
    requests,
    seal,
    token_digest,
)
from teacher_server.wire.status import ServerStatus, decode_status, encode_status
from teacher_server.wire.worker_protocol import Assignment, Dismiss, from_worker, to_worker
from tests.service.messages import make_hello, make_reply, make_request, make_status, make_tokens

CODECS: tuple[Codec[Any], ...] = (requests, replies, from_worker, to_worker)
SOME_ID = bytes(range(16))
NUMBERS = st.integers(-2, 60) | st.integers(-(2**63), 2**64 - 1) | st.floats()
PAIRS = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), max_size=3)
VALUES = st.none() | st.booleans() | NUMBERS | st.text(max_size=9) | st.binary(max_size=17) | st.lists(NUMBERS) | PAIRS
BORDERS = [float("nan"), float("inf"), -1, 0, 1, 1 << 24, 1 << 40, (1 << 64) - 1, None, "", b""]
Message = list[bytes]


def checksums(frames: list[Any]) -> list[int]:
    return [checksum(frame) for frame in frames]


def score_requests(tokens: np.ndarray) -> list[tuple[Any, list[Any]]]:
    """Return a valid request of each kind with its frames."""
    frame = as_frame(tokens)
    given_ids = pack_given(np.array([[3, 1 << 20, 0], [7, 5, 6]], np.int32))
    units = np.arange(5, dtype=np.int32) % 3
    mapped = {"n_mapped": 5, "given_checksums": checksums(pack_units(units)), "units": token_digest(units)}
    marked = np.where(np.arange(12) % 4 == 2, ~tokens, tokens)
    several = {"prompt_length": 3, "lengths": [(2, 5), (1, 7)], "n_own": 6}
    return [
        (make_request(tokens), [frame]),
        (make_request(tokens, signal="logits"), [frame]),
        (make_request(tokens, n_given=3, given_checksums=checksums(given_ids)), [frame, *given_ids]),
        (make_request(tokens, k=2, n_vocab=3, **mapped), [frame, *pack_units(units)]),
        (make_request(tokens, prompt_length=5, lengths=[(2, 5), (3, 7)]), [frame]),
        (make_request(marked, **several), [as_frame(marked)]),
    ]


def score_replies(tokens: np.ndarray) -> list[tuple[Any, list[Any]]]:
    """Return a valid reply of each kind with its frames."""
    found: list[tuple[Any, list[Any]]] = []
    for wire in ("fp16", "fp32"):
        for more in ({"with_sampled": True}, {"mass": 0.9}):
            found.append(make_reply(make_request(tokens, k=3, wire=wire, **more), tokens))
    sampled, _ = make_reply(make_request(tokens), tokens, signal="sampled", k=0, n_entries=0)
    frames = pack_sampled(np.zeros(sampled.n_rows, np.float32), sampled)
    sampled.checksums = checksums(frames)
    found.append((sampled, frames))
    for dtype, numpy_dtype in (("float16", "<f2"), ("bfloat16", "<u2"), ("float32", "<f4")):
        rows = np.ones((3, 4), numpy_dtype)
        fields: dict[str, Any] = {"dtype": dtype, "n_rows": 3, "start": 0, "stop": 3, "n_cols": 4, "index": 0}
        fields |= {"request_id": SOME_ID, "token_digest": SOME_ID, "stream_id": SOME_ID, "signal": "hidden"}
        fields |= {"model_fingerprint": "f", "worker": "w", "queue_s": 0.0, "compute_s": 0.0}
        found.append((RowsReply(checksums=checksums([as_frame(rows)]), **fields), [as_frame(rows)]))
    return found


def corpus() -> list[Message]:
    """Return valid messages; headers without magic, version and checksum."""
    tokens = make_tokens(12)
    plain = [
        HeadRequest(request_id=SOME_ID, wire="fp16", deadline_s=1.0),
        Received(request_id=SOME_ID, stream_id=SOME_ID, n_messages=3),
        InfoRequest(request_id=SOME_ID, teacher="math"),
        Pong(epoch=SOME_ID, n_workers=1, n_queued=2),
        ErrorReply(request_id=SOME_ID, code="busy", text="full", retry_after_s=0.2),
        make_hello(),
        Assignment(job_id=SOME_ID, stream_id=SOME_ID, waited_s=1.0, remaining_s=2.0),
        Dismiss(why="NaN"),
    ]
    headers = [*((header, []) for header in plain), *score_requests(tokens), *score_replies(tokens)]
    encoded = [[msgspec.msgpack.encode(header), *map(bytes, frames)] for header, frames in headers]
    header, frame = encode_status(SOME_ID, make_status())
    return [*encoded, [header[BODY_AT:], frame]]


CORPUS = corpus()
MESSAGES = st.sampled_from(CORPUS) | st.sampled_from([message for message in CORPUS if len(message) > 1])


def is_accepted(frame: bytes, frames: Message, *, corrected: bool) -> bool:
    """Decode a message with every codec. Returns whether one of them finds it valid.

    Args:
        corrected: give the header the checksums of the frames, so that what they contain is checked.
    """
    valid = False
    for codec in CODECS:
        with contextlib.suppress(ProtocolError):
            header = codec.decode(frame)
            assert codec.decode(codec.encode(header)) == header, "decoding the encoded header gave another header"
            if corrected and hasattr(header, "checksums"):
                header.checksums = checksums(frames)
            if corrected and isinstance(header, ScoreRequest):
                header.checksum, *header.given_checksums = checksums(frames) or [0]
                header.units = token_digest(b"".join(frames[1:])) if header.n_mapped else header.units
            unpack(header, frames)
            valid = True
    return valid


def unpack(header: Any, frames: Message) -> None:
    """Decode the frames as their receiver does, and check what it relies on. Raises ProtocolError."""
    if isinstance(header, ScoreRequest):
        tokens, ids = unpack_tokens(header, frames[:1]), unpack_given(header, frames[1:])
        assert tokens.shape == (header.total_length,) and unmarked(tokens).min() >= 0
        assert np.count_nonzero(tokens >= 0) == header.prompt_length + header.n_rows
        assert (ids is None) == (header.n_given == 0 or header.n_mapped > 0)
        if (units := unpack_units(header, frames[1:])) is not None:
            assert len(units) == header.n_mapped and 0 <= units.min() <= units.max() < header.n_vocab
        if ids is not None:
            assert ids.shape == (header.n_rows, header.n_given) and ids.min() >= 0
            assert isinstance(given_problem(ids, header.n_rows, header.n_vocab or 50), str)
    elif isinstance(header, StatusReply):
        assert isinstance(decode_status(header, frames), ServerStatus)
    elif isinstance(header, RowsReply):
        rows = unpack_rows(header, frames)
        assert rows.shape == (header.stop - header.start, header.n_cols) and np.isfinite(rows).all()
    elif isinstance(header, ScoreReply):
        check_reply(header, frames)
        if header.signal == "sampled":
            assert np.isfinite(unpack_sampled(header, frames)).all()
            return
        scores = unpack_topk(header, frames)
        listed = scores.ids >= 0
        assert scores.ids.shape == scores.logprobs.shape == (header.n_rows, header.k)
        assert np.isfinite(scores.logprobs[listed]).all() and np.isneginf(scores.logprobs[~listed]).all()
        assert np.isfinite(scores.tail).all() and int(listed.sum()) == header.n_entries
        assert (scores.sampled is not None) == header.with_sampled and pack_topk(scores, header)


def damaged(data: st.DataObject, message: Message) -> Message:
    """Return a copy with a few changes anywhere in it."""
    message = list(message)
    for _ in range(data.draw(st.integers(0, 2))):
        part = data.draw(st.integers(0, len(message) - 1))
        raw = bytearray(message[part])
        match data.draw(st.sampled_from(["set", "set", "flip", "cut", "grow", "swap", "drop"])):
            case "set" if raw:  # NaN, -1, a large number or 0, depending on the dtype
                at = 4 * data.draw(st.integers(0, (len(raw) - 1) // 4))
                raw[at : at + 4] = data.draw(st.sampled_from([b"\xff", b"\x7f", b"\0"])) * len(raw[at : at + 4])
                message[part] = bytes(raw)
            case "flip" if raw:
                raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
                message[part] = bytes(raw)
            case "cut":
                message[part] = bytes(raw[: data.draw(st.integers(0, len(raw)))])
            case "grow":
                message[part] = bytes(raw) + data.draw(st.binary(max_size=8))
            case "swap":
                other = data.draw(st.integers(0, len(message) - 1))
                message[part], message[other] = message[other], message[part]
            case "drop" if len(message) > 1:
                del message[part]
    return message


def test_undamaged_messages_are_accepted() -> None:
    """Fails if the other tests start from messages that are refused, so that they only reach the first check."""
    for body, *frames in CORPUS:
        assert is_accepted(seal(body), frames, corrected=False), body


@settings(max_examples=500)
@given(st.data(), MESSAGES)
def test_damage_is_noticed(data: st.DataObject, message: Message) -> None:
    """Fails if damage anywhere in a message can give wrong numbers, or an exception other than ProtocolError."""
    body, *frames = message
    sent = [seal(body), *frames]
    frame, *received = damaged(data, sent)
    assert not is_accepted(frame, received, corrected=False) or [frame, *received] == sent


@settings(max_examples=2000)
@given(st.data(), MESSAGES)
def test_hostile_messages_are_refused_or_valid(data: st.DataObject, message: Message) -> None:
    """Fails if wrong values with right checksums raise anything but ProtocolError, or break what receivers rely on."""
    body, *frames = message
    match data.draw(st.sampled_from(["field", "header", "frames"])):
        case "field":
            fields = msgspec.msgpack.decode(body)
            optional = ["k", "n_own", "n_given", "n_mapped", "n_vocab", "lengths", "mass"]
            name = data.draw(st.sampled_from(sorted(fields) + optional))
            body = msgspec.msgpack.encode(fields | {name: data.draw(st.sampled_from(BORDERS) | VALUES)})
        case "header":
            (body,) = damaged(data, [body])
            is_accepted(seal(data.draw(st.binary(max_size=300))), frames, corrected=True)
        case "frames" if frames:
            frames = damaged(data, frames)
    is_accepted(seal(body), frames, corrected=True)
