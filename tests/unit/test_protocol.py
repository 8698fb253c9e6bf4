"""Protocol v1: what is sent is what arrives, or it is a ProtocolError and nothing else."""

from __future__ import annotations

import os
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from teacher_server import protocol
from teacher_server.backplane import Done, WorkerHello, from_worker
from teacher_server.protocol import (
    MAX_FRAME_BYTES,
    MAX_ID,
    Codec,
    ErrorReply,
    ProtocolError,
    ScoreRequest,
    TopKReply,
    Wire,
    as_frame,
    checksum,
    pack_topk,
    replies,
    requests,
    token_digest,
    tokenizer_fingerprint,
    unpack_tokens,
    unpack_topk,
)

WIRES: list[Wire] = ["fp16", "fp32"]


def make_request(**changes: Any) -> ScoreRequest:
    tokens = np.arange(20, dtype=np.int32)
    fields: dict[str, Any] = {
        "request_id": bytes(range(16)),
        "signal": "topk",
        "k": 4,
        "temperature": 1.0,
        "n_vocab": 100,
        "prompt_length": 7,
        "total_length": 20,
        "wire": "fp16",
        "deadline_s": 5.0,
        "checksum": checksum(as_frame(tokens)),
    }
    return ScoreRequest(**(fields | changes))


Reply = tuple[TopKReply, list[memoryview], np.ndarray, np.ndarray]


def make_reply(n_rows: int, k: int, wire: Wire, seed: int = 0) -> Reply:
    """(header, frames, ids, logprobs) of random scores over ids up to 2^24 - 1."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, MAX_ID, (n_rows, k), endpoint=True).astype(np.int32)
    logprobs = -np.sort(rng.exponential(4.0, (n_rows, k)).astype(np.float32), axis=1)
    frames = pack_topk(ids, logprobs, wire)
    reply = TopKReply(
        request_id=os.urandom(16),
        token_digest=os.urandom(16),
        model_fingerprint="f" * 32,
        n_rows=n_rows,
        k=k,
        wire=wire,
        checksums=[checksum(frame) for frame in frames],
        queue_s=0.25,
        compute_s=1.5,
    )
    return reply, frames, ids, logprobs


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (1000, 64), (40_000, 64)])
def test_scores_survive_the_wire(wire: Wire, shape: tuple[int, int]) -> None:
    """Would break if planes, chunks of rows or dtypes of the two sides disagreed; the last shape needs many frames."""
    reply, frames, ids, logprobs = make_reply(*shape, wire)
    assert all(frame.nbytes <= MAX_FRAME_BYTES for frame in frames)
    header = replies.decode(replies.encode(reply))
    assert header == reply and isinstance(header, TopKReply)
    got_ids, got_logprobs = unpack_topk(header, [bytes(frame) for frame in frames])
    np.testing.assert_array_equal(got_ids, ids)
    expected = logprobs if wire == "fp32" else logprobs.astype(np.float16).astype(np.float32)
    np.testing.assert_array_equal(got_logprobs, expected)
    assert (got_ids.dtype, got_logprobs.dtype) == (np.int32, np.float32)
    assert sum(frame.nbytes for frame in frames) == ids.size * (8 if wire == "fp32" else 5)


def test_fp16_never_makes_an_infinity() -> None:
    """Would break if a very improbable token became -inf, which is NaN once multiplied by a zero probability."""
    ids, logprobs = np.array([[1, 2]]), np.array([[0.0, -1e6]], np.float32)
    frames = pack_topk(ids, logprobs, "fp16")
    assert np.isfinite(np.frombuffer(frames[0], "<f2")).all()


@pytest.mark.parametrize(
    "changes",
    [
        {"k": 0},
        {"k": 101},  # > n_vocab
        {"temperature": 0.0},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"deadline_s": float("nan")},
        {"deadline_s": -1.0},
        {"prompt_length": 0},
        {"prompt_length": 20},
        {"total_length": (1 << 20) + 1},
        {"n_vocab": -1},
        {"request_id": b"short"},
        {"signal": "logits"},
        {"wire": "bf16"},
        {"checksum": -1},
        {"checksum": 1 << 64},
        {"k": 1 << 16, "n_vocab": 0, "total_length": 1 << 20},  # too many entries
    ],
)
def test_out_of_range_requests_do_not_leave_the_sender(changes: dict[str, Any]) -> None:
    """Would break if only the receiver checked: the error would come without the line that caused it."""
    with pytest.raises((ProtocolError, ValueError)):
        requests.encode(make_request(**changes))


def test_tokens_must_be_what_the_header_says() -> None:
    """Would break if a cut, damaged or negative token row could be scored."""
    tokens = np.arange(20, dtype=np.int32)
    request = make_request()
    np.testing.assert_array_equal(unpack_tokens(request, [tokens.tobytes()]), tokens)
    negative = tokens - 1
    for frames in ([], [b""], [tokens.tobytes()[:-4]], [tokens[::-1].tobytes()], [tokens.tobytes()] * 2):
        with pytest.raises(ProtocolError):
            unpack_tokens(request, frames)
    with pytest.raises(ProtocolError, match="leave"):
        unpack_tokens(make_request(checksum=checksum(negative.tobytes())), [negative.tobytes()])


@pytest.mark.parametrize("shapes", [((0, 4), (0, 4)), ((4, 0), (4, 0)), ((2, 3), (3, 2)), ((4,), (4,))])
def test_empty_or_unequal_scores_are_refused(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    """Would break if an empty array reached `max()` as a bare ValueError."""
    with pytest.raises(ProtocolError):
        pack_topk(np.zeros(shapes[0], np.int32), np.zeros(shapes[1], np.float32), "fp32")


def test_other_versions_and_services_are_named() -> None:
    """Would break if a peer of another version were met with a puzzle instead of its version."""
    frame = bytearray(requests.encode(make_request()))
    frame[3] = 9
    with pytest.raises(ProtocolError, match="speaks protocol 9, this side 1"):
        requests.decode(bytes(frame))
    with pytest.raises(ProtocolError, match="another service"):
        requests.decode(b"GET / HTTP/1.1\r\n\r\n")


@settings(max_examples=300, deadline=None)
@given(data=st.data(), wire=st.sampled_from(WIRES))
def test_mutated_messages_are_errors_or_equal(data: st.DataObject, wire: Wire) -> None:
    """Would break if damage anywhere in a message could yield other numbers, or another kind of exception."""
    reply, frames, ids, logprobs = make_reply(3, 5, wire, seed=1)
    message = [replies.encode(reply), *(bytes(frame) for frame in frames)]
    reference = unpack_topk(reply, frames)
    for _ in range(data.draw(st.integers(1, 3))):
        part = data.draw(st.integers(0, len(message) - 1))
        raw = bytearray(message[part])
        match data.draw(st.sampled_from(["flip", "cut", "grow", "swap", "drop"])):
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
    try:
        header = replies.decode(message[0])
        assert isinstance(header, TopKReply)
        got = unpack_topk(header, message[1:])
    except ProtocolError:
        return
    assert header == reply
    np.testing.assert_array_equal(got[0], reference[0])
    np.testing.assert_array_equal(got[1], reference[1])


@settings(max_examples=500, deadline=None)
@given(body=st.binary(max_size=300), flips=st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), max_size=4))
def test_hostile_headers_are_errors_or_valid(body: bytes, flips: list[tuple[int, int]]) -> None:
    """Would break if a well-sealed but nonsensical header raised anything but ProtocolError (bad UTF-8 did once)."""
    honest = bytearray(msgspec.msgpack.encode(make_request()))
    for at, value in flips:
        honest[at % len(honest)] = value
    for raw in (body, bytes(honest)):
        sealed = protocol._PREFIX + checksum(raw).to_bytes(8, "little") + raw
        codecs: tuple[Codec[Any], ...] = (requests, replies, from_worker)
        for codec in codecs:
            try:
                header = codec.decode(sealed)
            except ProtocolError:
                continue
            assert codec.decode(codec.encode(header)) == header


def test_bad_utf8_is_a_protocol_error() -> None:
    """Would break if msgspec's bare UnicodeDecodeError came through and ended the broker."""
    good = replies.encode(ErrorReply(request_id=bytes(16), code="engine", text="AAAAAAAA"))
    raw = good[protocol._BODY_AT :].replace(b"AAAAAAAA", b"\xff" * 8)
    with pytest.raises(ProtocolError):
        replies.decode(protocol._PREFIX + checksum(raw).to_bytes(8, "little") + raw)


def test_a_worker_message_is_not_a_client_message() -> None:
    """Would break if a client could register itself as a worker through the front door."""
    with pytest.raises(ProtocolError):
        requests.decode(from_worker.encode(Done(job_id=bytes(16))))
    assert WorkerHello.__struct_config__.tag != ScoreRequest.__struct_config__.tag


def test_digest_and_fingerprint_tell_apart() -> None:
    """Would break if token dtype or dict order mattered, or two swapped tokens looked the same."""
    tokens = np.array([1, 2, 3], np.int64)
    assert token_digest(tokens) == token_digest(tokens.astype(np.int32)) != token_digest(tokens[::-1])
    one = tokenizer_fingerprint({"a": 0, "b": 1})
    assert one == tokenizer_fingerprint({"b": 1, "a": 0})
    assert one != tokenizer_fingerprint({"a": 1, "b": 0})
    assert tokenizer_fingerprint({"a": 0, "1:1:b": 1}) != tokenizer_fingerprint({"a0": 0, "b": 1})
