"""Protocol v1, headers: what is sent is what arrives, or it is a ProtocolError and nothing else."""

from __future__ import annotations

import os
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from teacher_server.wire import protocol
from teacher_server.wire.protocol import (
    ClientMessage,
    Codec,
    ErrorReply,
    ProtocolError,
    ScoreRequest,
    ServerMessage,
    StatusReply,
    checksum,
    replies,
    requests,
    token_digest,
    tokenizer_fingerprint,
)
from teacher_server.wire.status import ServerStatus, decode_status, encode_status
from teacher_server.wire.worker_protocol import Done, WorkerHello, from_worker, to_worker
from tests.service.messages import make_reply, make_request, make_tokens


@pytest.mark.parametrize(
    "changes",
    [
        {"k": 0},
        {"k": 31, "n_vocab": 30},
        {"k": 4, "signal": "sampled"},
        {"mass": 1.1},
        {"mass": float("nan")},
        {"mass": 0.5, "signal": "logits"},
        {"temperature": 0.0},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"deadline_s": float("nan")},
        {"deadline_s": -1.0},
        {"prompt_length": 0},
        {"prompt_length": 40},
        {"total_length": (1 << 20) + 1},
        {"n_vocab": -1},
        {"request_id": b"short"},
        {"signal": "entropy"},
        {"teacher": "x" * 200},
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


def test_other_versions_and_services_are_named() -> None:
    """Would break if a peer of another version were met with a puzzle instead of its version."""
    frame = bytearray(requests.encode(make_request()))
    frame[3] = 9
    with pytest.raises(ProtocolError, match="speaks protocol 9, this side 1"):
        requests.decode(bytes(frame))
    with pytest.raises(ProtocolError, match="another service"):
        requests.decode(b"GET / HTTP/1.1\r\n\r\n")


@settings(max_examples=500, deadline=None)
@given(body=st.binary(max_size=300), flips=st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), max_size=4))
def test_hostile_headers_are_errors_or_valid(body: bytes, flips: list[tuple[int, int]]) -> None:
    """Would break if a well-sealed but nonsensical header raised anything but ProtocolError (bad UTF-8 did once)."""
    honest = bytearray(msgspec.msgpack.encode(make_request()))
    for at, value in flips:
        honest[at % len(honest)] = value
    for raw in (body, bytes(honest)):
        sealed = protocol._PREFIX + checksum(raw).to_bytes(8, "little") + raw
        codecs: tuple[Codec[Any], ...] = (requests, replies, from_worker, to_worker)
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


def test_every_message_has_a_tag_of_its_own() -> None:
    """Would break if two messages of one codec shared a tag: one would be taken for the other."""
    for union in (ClientMessage, ServerMessage):
        tags = [kind.__struct_config__.tag for kind in union.__args__]
        assert len(set(tags)) == len(tags)


@pytest.mark.parametrize(
    "changes",
    [
        {"n_entries": 119},
        {"n_entries": 121},
        {"n_entries": 29, "adaptive": True},
        {"k": 0},
        {"signal": "sampled"},
        {"queue_s": float("nan")},
        {"checksums": [0] * 257},
        {"n_rows": 1 << 20, "k": 1 << 16, "n_entries": 1 << 36},
    ],
)
def test_impossible_replies_are_not_sent(changes: dict[str, Any]) -> None:
    """Would break if a header could announce more entries than its rows hold, or more than memory does."""
    tokens = make_tokens()
    reply, _ = make_reply(make_request(tokens), tokens, **changes)
    with pytest.raises(ProtocolError):
        replies.encode(reply)


def test_status_survives_and_damage_does_not() -> None:
    """Would break if the status table could be cut or altered unseen, or another service's bytes shown as a status."""
    status = ServerStatus(
        epoch="e",
        uptime_s=1.0,
        draining=False,
        n_queued=1,
        queued_bytes=2,
        n_answered=3,
        n_errors={"busy": 4},
        n_retried=5,
        n_lost_workers=6,
        excluded={"w1": "NaN"},
        teachers=[],
        workers=[],
    )
    header, frame = encode_status(os.urandom(16), status)
    reply = replies.decode(header)
    assert isinstance(reply, StatusReply) and decode_status(reply, [frame]) == status
    for bad in ([], [frame, frame], [frame[:-1]], [b"\xff" + frame[1:]]):
        with pytest.raises(ProtocolError):
            decode_status(reply, bad)
    nonsense = b"\xc1"
    with pytest.raises(ProtocolError):
        decode_status(StatusReply(request_id=bytes(16), checksums=[checksum(nonsense)]), [nonsense])
