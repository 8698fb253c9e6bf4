"""Headers of the protocol: decoding returns what was encoded or raises ProtocolError."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from teacher_server.wire.fingerprint import tokenizer_fingerprint
from teacher_server.wire.protocol import ProtocolError, ScoreRequest, replies, requests, token_digest
from teacher_server.wire.worker_protocol import Done, WorkerHello, from_worker
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
        {"deadline_s": float("nan")},
        {"deadline_s": -1.0},
        {"prompt_length": 0},
        {"prompt_length": 40},
        {"request_id": b"short"},
        {"checksum": 1 << 64},
        {"k": 1 << 16, "n_vocab": 0, "total_length": 1 << 20},  # too many entries
        {"n_given": 5},
        {"n_given": 2, "mass": 0.9},
        {"n_given": 2, "signal": "sampled"},
        {"with_sampled": True, "signal": "logits"},
        {"lengths": [(10, 40)]},
        {"lengths": [(5, 20), (4, 20)]},
        {"lengths": [(9, 10), (1, 30), (0, 0)]},
        {"lengths": [(9, 9), (1, 31)]},
        {"lengths": [(5, 20), (5, 20)], "signal": "hidden"},
        {"lengths": [(1, 2)] * 257, "prompt_length": 257, "total_length": 514},
        {"n_own": -1},
        {"n_own": 30},  # all: then it is 0
        {"n_own": 31},
        {"n_own": 1, "lengths": [(5, 20), (5, 20)]},
        {"n_own": 2, "n_given": 5},
        {"k": 1 << 16, "n_vocab": 0, "total_length": 1 << 20, "n_own": 513},  # too many entries
    ],
)
def test_out_of_range_requests_are_refused_by_the_sender(changes: dict[str, Any]) -> None:
    """Fails if only the receiver checks: the traceback would lack the line that made the request."""
    with pytest.raises((ProtocolError, ValueError)):
        requests.encode(make_request(**changes))


def test_a_worker_message_is_not_a_client_message() -> None:
    """Fails if a client can register as a worker on the client port."""
    with pytest.raises(ProtocolError):
        requests.decode(from_worker.encode(Done(job_id=bytes(16))))
    assert WorkerHello.__struct_config__.tag != ScoreRequest.__struct_config__.tag


def test_digest_and_fingerprint_depend_on_tokens_and_order_only() -> None:
    """Fails if token dtype or dict order matters, or two swapped tokens have the same digest."""
    tokens = np.array([1, 2, 3], np.int64)
    assert token_digest(tokens) == token_digest(tokens.astype(np.int32)) != token_digest(tokens[::-1])
    one = tokenizer_fingerprint({"a": 0, "b": 1})
    assert one == tokenizer_fingerprint({"b": 1, "a": 0})
    assert one != tokenizer_fingerprint({"a": 1, "b": 0})
    assert tokenizer_fingerprint({"a": 0, "1:1:b": 1}) != tokenizer_fingerprint({"a0": 0, "b": 1})


@pytest.mark.parametrize(
    "changes",
    [
        {"n_entries": 119},
        {"n_entries": 121},
        {"n_entries": 29, "adaptive": True},
        {"k": 0},
        {"signal": "sampled"},
        {"k": 0, "n_entries": 0, "signal": "sampled", "with_sampled": True},
        {"queue_s": float("nan")},
        {"checksums": [0] * 257},
        {"n_rows": 1 << 20, "k": 1 << 16, "n_entries": 1 << 36},
    ],
)
def test_impossible_replies_are_not_sent(changes: dict[str, Any]) -> None:
    """Fails if a header can announce more entries than its rows have, or more than the limits."""
    tokens = make_tokens()
    reply, _ = make_reply(make_request(tokens), tokens, **changes)
    with pytest.raises(ProtocolError):
        replies.encode(reply)
