"""The client against a scripted server that misbehaves in every way a network or a bug can."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import zmq

from gkd.errors import ConfigError, TeacherError, TeacherUnavailable
from teacher_server.protocol import (
    Buffer,
    ErrorReply,
    Ping,
    Pong,
    ScoreRequest,
    ServerMessage,
    TopKReply,
    checksum,
    pack_topk,
    replies,
    requests,
    token_digest,
    unpack_tokens,
)
from tests.service.harness import connect, random_rollouts

pytestmark = pytest.mark.service
N_VOCAB, K = 50, 8
Message = list[Buffer]
Script = Callable[[ScoreRequest, np.ndarray, int], list[Message]]


def honest(request: ScoreRequest, tokens: np.ndarray, **changes: Any) -> Message:
    """A valid answer whose top id at row j is the response token j, so that mixed-up replies show."""
    response = tokens[request.prompt_length :, None]
    ids = ((response + np.arange(request.k)) % N_VOCAB).astype(np.int32)  # [R, K]
    logprobs = np.tile(np.log(0.5) * np.arange(1, request.k + 1, dtype=np.float32), (len(ids), 1))
    frames = pack_topk(ids, logprobs, request.wire)
    fields: dict[str, Any] = {
        "request_id": request.request_id,
        "token_digest": token_digest(tokens),
        "model_fingerprint": "model-a",
        "n_rows": len(ids),
        "k": request.k,
        "wire": request.wire,
        "checksums": [checksum(frame) for frame in frames],
        "queue_s": 0.0,
        "compute_s": 0.0,
    }
    return [replies.encode(TopKReply(**(fields | changes))), *frames]


def error(request: ScoreRequest, code: Any, retry_after_s: float = 0.0) -> Message:
    message: ServerMessage = ErrorReply(
        request_id=request.request_id, code=code, text="scripted", retry_after_s=retry_after_s
    )
    return [replies.encode(message)]


@contextmanager
def scripted_server(script: Script) -> Iterator[int]:
    """A ROUTER that answers pings, and request number n of a client with `script(request, tokens, n)`."""
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    ended = threading.Event()
    epoch = os.urandom(16)

    def serve() -> None:
        n_seen = 0
        while not ended.is_set():
            if not router.poll(20):
                continue
            identity, head, *frames = router.recv_multipart()
            request = requests.decode(head)
            if isinstance(request, Ping):
                router.send_multipart([identity, replies.encode(Pong(epoch=epoch, n_workers=1, n_queued=0))])
            elif isinstance(request, ScoreRequest):
                for message in script(request, unpack_tokens(request, frames), n_seen):
                    router.send_multipart([identity, *message])
                n_seen += 1
        router.close(linger=0)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield port
    finally:
        ended.set()
        thread.join(timeout=5)
        context.destroy(linger=0)


def run(script: Script, n: int = 12, **options: Any) -> tuple[list[int], Any]:
    """Score `n` rollouts; checks that each answer belongs to its sequence. Returns (order of completion, stats)."""
    rollouts = random_rollouts(n, N_VOCAB)
    with scripted_server(script) as port:
        teacher = connect(port, **({"n_vocab": N_VOCAB, "k": K} | options))
        try:
            order = []
            for index, scores in teacher.score(rollouts):
                np.testing.assert_array_equal(scores.topk_ids[:, 0], rollouts[index].response_ids)
                order.append(index)
            return order, teacher.stats
        finally:
            teacher.close()


def test_out_of_order_replies_find_their_sequence() -> None:
    """Would break if replies were matched by order instead of by request id."""
    held: list[Message] = []

    def script(request: ScoreRequest, tokens: np.ndarray, n: int) -> list[Message]:
        held.append(honest(request, tokens))
        return [held.pop() for _ in range(4)] if len(held) == 4 else []

    order, _ = run(script, n_in_flight=4)
    assert order == [3, 2, 1, 0, 7, 6, 5, 4, 11, 10, 9, 8]


def test_late_and_duplicate_replies_are_used_once() -> None:
    """Would break if one late reply wedged the client or gave a sequence twice."""

    def script(request: ScoreRequest, tokens: np.ndarray, n: int) -> list[Message]:
        stranger = honest(request, tokens, request_id=os.urandom(16))
        return [stranger, honest(request, tokens), honest(request, tokens)]

    order, stats = run(script, n_in_flight=2)
    assert sorted(order) == list(range(12))
    assert stats.n_unwanted >= 22  # the last duplicates may still be on their way


def test_lost_replies_are_asked_for_again_with_the_same_id() -> None:
    """Would break if a reply lost on the way stopped the run, or the resend looked like new work."""
    seen: dict[bytes, int] = {}

    def script(request: ScoreRequest, tokens: np.ndarray, n: int) -> list[Message]:
        seen[request.request_id] = seen.get(request.request_id, 0) + 1
        return [] if seen[request.request_id] == 1 else [honest(request, tokens)]

    order, stats = run(script, request_timeout_s=0.2)
    assert sorted(order) == list(range(12))
    assert len(seen) == 12 and stats.n_resent >= 12


@pytest.mark.parametrize("code", ["busy", "deadline", "damaged"])
def test_passing_troubles_are_retried(code: str) -> None:
    """Would break if a full queue or an expired deadline ended the run."""
    seen: dict[bytes, int] = {}

    def script(request: ScoreRequest, tokens: np.ndarray, n: int) -> list[Message]:
        seen[request.request_id] = seen.get(request.request_id, 0) + 1
        return [error(request, code, 0.02)] if seen[request.request_id] < 3 else [honest(request, tokens)]

    order, stats = run(script, n_in_flight=3)
    assert sorted(order) == list(range(12)) and stats.n_resent == 24


@pytest.mark.parametrize("code", ["bad_request", "worker_lost", "engine"])
def test_final_troubles_name_the_sequence(code: str) -> None:
    """Would break if the client retried for ever, or skipped the sequence."""
    with pytest.raises(TeacherError, match=f"prompt 0, sample 0: .*{code}: scripted"):
        run(lambda request, tokens, n: [error(request, code)])


def damage_frame(request: ScoreRequest, tokens: np.ndarray) -> Message:
    message = honest(request, tokens)
    return [message[0], bytes(message[1])[:-1] + b"\x01", *message[2:]]


def damage_digest(request: ScoreRequest, tokens: np.ndarray) -> Message:
    return honest(request, tokens, token_digest=bytes(16))


def drop_frame(request: ScoreRequest, tokens: np.ndarray) -> Message:
    return honest(request, tokens)[:-1]


@pytest.mark.parametrize("damage", [damage_frame, damage_digest, drop_frame])
def test_damage_is_retried_and_then_an_error(damage: Callable[[ScoreRequest, np.ndarray], Message]) -> None:
    """Would break if scores of other tokens, or flipped bits, could be trained on."""
    order, stats = run(lambda request, tokens, n: [honest(request, tokens) if n % 2 else damage(request, tokens)])
    assert sorted(order) == list(range(12)) and stats.n_damaged > 0
    with pytest.raises(TeacherError, match="damaged 6 times"):
        run(lambda request, tokens, n: [damage(request, tokens)], n=1)


def test_another_model_behind_the_address_stops_the_run() -> None:
    """Would break if a server restarted with other weights changed the teacher in the middle of a run."""
    with pytest.raises(TeacherError, match="now serves model-b, before it was model-a"):
        run(lambda request, tokens, n: [honest(request, tokens, model_fingerprint="model-b" if n == 7 else "model-a")])


def test_impossible_scores_stop_the_run() -> None:
    """Would break if a reply with ids past the vocabulary reached the loss."""
    with pytest.raises(TeacherError, match="outside"):
        run(lambda request, tokens, n: [honest(request, tokens)], n_vocab=20)


def test_an_alive_but_stuck_server_is_given_up() -> None:
    """Would break if heartbeats alone kept a run waiting for ever."""
    started_s = time.monotonic()
    with pytest.raises(TeacherUnavailable, match=r"alive but has answered nothing .* 12 sequences are waited for"):
        run(lambda request, tokens, n: [], request_timeout_s=0.3, outage_budget_s=1.0)
    assert time.monotonic() - started_s < 4


def test_a_slow_consumer_is_not_an_outage() -> None:
    """Would break if the time the trainer spends between two results counted against the server."""
    rollouts = random_rollouts(3, N_VOCAB)
    with scripted_server(lambda request, tokens, n: [honest(request, tokens)]) as port:
        teacher = connect(port, n_vocab=N_VOCAB, n_in_flight=1, outage_budget_s=0.4, request_timeout_s=0.2)
        try:
            for _ in teacher.score(rollouts):
                time.sleep(0.8)
        finally:
            teacher.close()
        assert teacher.stats.n_resent == 0


@pytest.mark.parametrize(
    "settings,key",
    [
        ({"k": 0}, "teacher.topk"),
        ({"k": 9, "n_vocab": 8}, "teacher.topk"),
        ({"temperature": float("nan")}, "teacher.temperature"),
    ],
)
def test_bad_settings_are_config_errors(settings: dict[str, Any], key: str) -> None:
    """Would break if a wrong setting were found by the server, after the rollouts."""
    with pytest.raises(ConfigError, match=key):
        connect(15555, **settings)
