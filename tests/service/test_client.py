"""The client against a scripted server that misbehaves in every way a network or a bug can: answers and retries."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from gkd.errors import ConfigError, TeacherError
from teacher_server.wire.protocol import NO_REQUEST, Cancel, ErrorReply, ScoreRequest
from tests.service.harness import connect, random_rollouts
from tests.service.scripted import N_VOCAB, K, Message, ScriptedServer, answer, client, error, honest, one, run

pytestmark = pytest.mark.service


# Which answer belongs to which request


def test_out_of_order_replies_find_their_sequence() -> None:
    """Would break if replies were matched by order instead of by request id."""
    held: list[Message] = []

    def script(request: ScoreRequest, tokens: np.ndarray, n: int) -> list[Message]:
        held.append(honest(request, tokens))
        return [held.pop() for _ in range(4)] if len(held) == 4 else []

    order, _ = run(script, n_in_flight=4)
    assert [sorted(order[i : i + 4]) for i in (0, 4, 8)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert order[:4] == [3, 2, 1, 0]


def test_late_and_duplicate_replies_are_used_once() -> None:
    """Would break if one late reply wedged the client or gave a sequence twice."""

    def script(request: ScoreRequest, tokens: np.ndarray, n: int) -> list[Message]:
        stranger = honest(request, tokens, request_id=os.urandom(16))
        return [stranger, honest(request, tokens), honest(request, tokens)]

    order, stats = run(script, n_in_flight=2)
    assert sorted(order) == list(range(12))
    assert stats.n_unwanted >= 20  # the last duplicates may still be on their way


def test_lost_replies_are_asked_for_again_with_the_same_id() -> None:
    """Would break if a reply lost on the way stopped the run, or the resend looked like new work."""
    seen: dict[bytes, int] = {}

    def script(request: ScoreRequest, tokens: np.ndarray, n: int) -> list[Message]:
        seen[request.request_id] = seen.get(request.request_id, 0) + 1
        return [] if seen[request.request_id] == 1 else [honest(request, tokens)]

    order, stats = run(script, request_timeout_s=0.2)
    assert sorted(order) == list(range(12))
    assert len(seen) == 12 and stats.n_resent >= 12


# What is retried, and what is an error


@pytest.mark.parametrize("code", ["busy", "draining", "deadline", "damaged"])
def test_passing_troubles_are_retried(code: str) -> None:
    """Would break if a full queue, a server about to restart or an expired deadline ended the run."""
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


def drop_frame(request: ScoreRequest, tokens: np.ndarray) -> Message:
    return honest(request, tokens)[:-1]


def other_tokens(request: ScoreRequest, tokens: np.ndarray) -> Message:
    return honest(request, tokens, token_digest=bytes(16))


def no_worker(request: ScoreRequest, tokens: np.ndarray) -> Message:
    return honest(request, tokens, worker="")


def other_rows(request: ScoreRequest, tokens: np.ndarray) -> Message:
    n_rows = request.n_response + 1
    return honest(request, tokens, n_rows=n_rows, n_entries=n_rows * request.k)


def other_k(request: ScoreRequest, tokens: np.ndarray) -> Message:
    return honest(request, tokens, k=request.k + 1, n_entries=request.n_response * (request.k + 1))


def other_signal(request: ScoreRequest, tokens: np.ndarray) -> Message:
    return honest(request, tokens, signal="sampled", k=0, n_entries=0)


def other_wire(request: ScoreRequest, tokens: np.ndarray) -> Message:
    return honest(request, tokens, wire="fp16")


DAMAGES = [damage_frame, drop_frame, other_tokens, no_worker, other_rows, other_k, other_signal, other_wire]


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_retried_and_then_an_error(damage: Callable[[ScoreRequest, np.ndarray], Message]) -> None:
    """Would break if scores of other tokens, of another kind, or flipped bits, could be trained on."""
    order, stats = run(lambda request, tokens, n: [honest(request, tokens) if n % 2 else damage(request, tokens)])
    assert sorted(order) == list(range(12)) and stats.n_damaged > 0
    with pytest.raises(TeacherError, match="damaged 6 times"):
        run(lambda request, tokens, n: [damage(request, tokens)], n=1)


def test_swapped_replies_are_refused() -> None:
    """Would break if two workers' replies that changed places gave each sequence the other's scores."""
    held: list[tuple[ScoreRequest, np.ndarray]] = []

    def script(request: ScoreRequest, tokens: np.ndarray, n: int) -> list[Message]:
        if n >= 8:
            return [honest(request, tokens)]
        held.append((request, tokens))
        if len(held) < 2:
            return []
        (first, first_tokens), (second, second_tokens) = held
        held.clear()
        return [
            honest(first, first_tokens, request_id=second.request_id),
            honest(second, second_tokens, request_id=first.request_id),
        ]

    order, stats = run(script, n=8, response=(20, 20))  # so that they differ in their tokens alone
    assert sorted(order) == list(range(8)) and stats.n_damaged == 8


def test_an_unreadable_message_of_ours_or_theirs_is_sent_again_soon() -> None:
    """Would break if one flipped bit in a header cost a whole request_timeout_s."""
    cured = threading.Event()

    def script(request: ScoreRequest, tokens: np.ndarray, n: int) -> list[Message]:
        if cured.is_set():
            return [honest(request, tokens)]
        if n == 0:
            return one(ErrorReply(request_id=NO_REQUEST, code="damaged", text="scripted"))
        cured.set()
        return [[b"GKT\x01 flipped bits", *honest(request, tokens)[1:]]]

    started_s = time.monotonic()
    order, stats = run(script, n=1, request_timeout_s=60.0)
    assert order == [0] and stats.n_resent == 2
    assert time.monotonic() - started_s < 4


def test_another_model_behind_the_address_stops_the_run() -> None:
    """Would break if a server restarted with other weights changed the teacher in the middle of a run."""
    with pytest.raises(TeacherError, match="model-b, expected model-a"):
        run(lambda request, tokens, n: [honest(request, tokens, model_fingerprint="model-b" if n == 7 else "model-a")])
    with pytest.raises(TeacherError, match="model-a, expected model-x"):
        run(answer, expected_fingerprint="model-x")


def test_impossible_scores_stop_the_run() -> None:
    """Would break if a reply with ids past the vocabulary reached the loss."""
    with pytest.raises(TeacherError, match="prompt .* from worker 'w0': .*outside"):
        run(answer, n_vocab=20)


# What is asked


def test_the_teachers_name_is_sent_and_its_description_read() -> None:
    """Would break if one of several teachers could answer in another one's place, or its limits were lost."""
    with ScriptedServer(answer) as server, client(server, name="math") as teacher:
        info = teacher.info()
        list(teacher.score(random_rollouts(1, N_VOCAB)))
    assert (info.teacher, info.n_streams, info.hidden_size, info.dtype) == ("math", 24, 6, "float32")
    assert {request.teacher for request in server.seen if not isinstance(request, Cancel)} == {"math"}


@pytest.mark.parametrize("wire", ["fp16", "fp32"])
def test_a_mass_target_brings_counts(wire: Any) -> None:
    """Would break if rows of different lengths were misread, or their filling taken for scores."""
    rollout = random_rollouts(1, N_VOCAB, response=(20, 20))[0]
    with ScriptedServer(answer) as server, client(server, wire=wire) as teacher:
        scores = teacher.submit(rollout, mass=0.5).result(timeout=5)
    assert scores.counts is not None and server.of(ScoreRequest)[0].mass == 0.5
    np.testing.assert_array_equal(scores.counts, np.arange(20) % K + 1)
    for row in range(20):
        n = scores.counts[row]
        np.testing.assert_array_equal(scores.topk_ids[row, :n], (rollout.response_ids[row] + np.arange(n)) % N_VOCAB)
        assert (scores.topk_ids[row, n:] == -1).all() and (scores.topk_logprobs[row, n:] == -np.inf).all()
        assert scores.tail_mass[row] == pytest.approx(0.5**n, rel=1e-3)


def test_a_mass_target_that_was_missed_is_an_error() -> None:
    """Would break if the teacher could leave out more of the distribution than it was allowed to."""
    with (
        ScriptedServer(answer) as server,
        client(server) as teacher,
        pytest.raises(TeacherError, match="1 of 8 entries .* 0.5, .* 0.9"),
    ):
        teacher.submit(random_rollouts(1, N_VOCAB)[0], mass=0.9).result(timeout=5)


def test_the_sampled_tokens_logprobs() -> None:
    """Would break if the signal of one number a position were taken for a top-1, or ids for logprobs."""
    rollout = random_rollouts(1, N_VOCAB)[0]
    with ScriptedServer(answer) as server, client(server) as teacher:
        got = teacher.submit_sampled(rollout).result(timeout=5)
    np.testing.assert_array_equal(got, -rollout.response_ids.astype(np.float32))


@pytest.mark.parametrize(
    "settings,key",
    [
        ({"k": 0}, "teacher.topk"),
        ({"k": 9, "n_vocab": 8}, "teacher.topk"),
        ({"temperature": float("nan")}, "teacher.temperature"),
        ({"keys": "no/such/folder"}, "teacher.keys"),
        ({"name": "x" * 129}, "teacher.name"),
    ],
)
def test_bad_settings_are_config_errors(settings: dict[str, Any], key: str) -> None:
    """Would break if a wrong setting were found by the server, after the rollouts."""
    with pytest.raises(ConfigError, match=key):
        connect(15555, **settings)


def test_a_sequence_that_cannot_be_asked_about_is_named() -> None:
    """Would break if a broken rollout reached the wire, or its error did not say which one it is."""
    rollout = random_rollouts(1, N_VOCAB)[0]
    rollout.response_ids[0] = -1
    with connect(15555, n_vocab=N_VOCAB) as teacher, pytest.raises(TeacherError, match="prompt 0, sample 0"):
        teacher.submit(rollout)
