"""The client against a scripted server with network and server faults: matching of replies, and retries."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from gkd.config.load import load_config
from gkd.errors import TeacherError
from gkd.scoring.endpoint import ScoringEndpoint
from gkd.scoring.teacher.window import Window
from gkd.text.comparison import Comparison
from teacher_server.wire.protocol import NO_REQUEST, Cancel, ErrorReply, ScoreRequest
from tests.refusals import refuses
from tests.service.harness import connect, random_rollouts, score, submit
from tests.service.scripted import (
    N_VOCAB,
    K,
    Message,
    ScriptedServer,
    always_valid,
    client,
    error,
    one,
    run,
    valid_reply,
)

pytestmark = pytest.mark.service


# Matching of replies


def test_out_of_order_replies_are_matched() -> None:
    """Fails if replies are matched by order instead of by request id."""
    held: list[Message] = []

    def script(request: ScoreRequest, tokens: np.ndarray, n: int) -> list[Message]:
        held.append(valid_reply(request, tokens))
        return [held.pop() for _ in range(4)] if len(held) == 4 else []

    order, _ = run(script, n_in_flight=4)
    assert [sorted(order[i : i + 4]) for i in (0, 4, 8)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


def test_late_and_duplicate_replies_are_used_once() -> None:
    """Fails if a late reply blocks the client, or completes a sequence twice."""

    def script(request: ScoreRequest, tokens: np.ndarray, n: int) -> list[Message]:
        unknown = valid_reply(request, tokens, request_id=os.urandom(16))
        return [unknown, valid_reply(request, tokens), valid_reply(request, tokens)]

    order, stats = run(script, n_in_flight=2)
    assert sorted(order) == list(range(12))
    assert stats.n_unwanted >= 20  # the last duplicates may still be in flight


def test_requests_with_lost_replies_are_sent_again_with_the_same_id() -> None:
    """Fails if a lost reply ends the run, or if the resend has a new id."""
    seen: dict[bytes, int] = {}

    def script(request: ScoreRequest, tokens: np.ndarray, n: int) -> list[Message]:
        seen[request.request_id] = seen.get(request.request_id, 0) + 1
        return [] if seen[request.request_id] == 1 else [valid_reply(request, tokens)]

    order, stats = run(script, request_timeout_s=0.2)
    assert sorted(order) == list(range(12))
    assert len(seen) == 12 and stats.n_resent >= 12


# Retries and errors


@pytest.mark.parametrize("code", ["busy", "draining", "deadline", "damaged"])
def test_transient_errors_are_retried(code: str) -> None:
    """Fails if a full queue, a draining server or an expired deadline ends the run."""
    seen: dict[bytes, int] = {}

    def script(request: ScoreRequest, tokens: np.ndarray, n: int) -> list[Message]:
        seen[request.request_id] = seen.get(request.request_id, 0) + 1
        return [error(request, code, 0.02)] if seen[request.request_id] < 3 else [valid_reply(request, tokens)]

    order, stats = run(script, n_in_flight=3)
    assert sorted(order) == list(range(12)) and stats.n_resent == 24


@pytest.mark.parametrize("code", ["bad_request", "worker_lost", "engine"])
def test_final_errors_name_the_sequence(code: str) -> None:
    """Fails if the client retries a final error forever, or skips the sequence."""
    with pytest.raises(TeacherError, match=f"prompt 0, sample 0.*{code}.*scripted"):
        run(lambda request, tokens, n: [error(request, code)])


def damage_frame(request: ScoreRequest, tokens: np.ndarray) -> Message:
    message = valid_reply(request, tokens)
    return [message[0], bytes(message[1])[:-1] + b"\x01", *message[2:]]


def drop_frame(request: ScoreRequest, tokens: np.ndarray) -> Message:
    return valid_reply(request, tokens)[:-1]


def other_rows(request: ScoreRequest, tokens: np.ndarray) -> Message:
    n_rows = request.n_response + 1
    return valid_reply(request, tokens, n_rows=n_rows, n_entries=n_rows * request.k)


def other_k(request: ScoreRequest, tokens: np.ndarray) -> Message:
    return valid_reply(request, tokens, k=request.k + 1, n_entries=request.n_response * (request.k + 1))


def changed(**header: Any) -> Callable[[ScoreRequest, np.ndarray], Message]:
    return lambda request, tokens: valid_reply(request, tokens, **header)


DAMAGES = [damage_frame, drop_frame, other_rows, other_k, changed(token_digest=bytes(16)), changed(worker="")]
DAMAGES += [changed(signal="sampled", k=0, n_entries=0), changed(wire="fp16")]


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_retried_and_then_an_error(damage: Callable[[ScoreRequest, np.ndarray], Message]) -> None:
    """Fails if scores for other tokens, of another kind, or with flipped bits are used for training."""
    order, stats = run(lambda request, tokens, n: [valid_reply(request, tokens) if n % 2 else damage(request, tokens)])
    assert sorted(order) == list(range(12)) and stats.n_damaged > 0
    with pytest.raises(TeacherError):
        run(lambda request, tokens, n: [damage(request, tokens)], n=1)


def test_swapped_replies_are_refused() -> None:
    """Fails if swapped replies give each sequence the scores of the other one."""
    held: list[tuple[ScoreRequest, np.ndarray]] = []

    def script(request: ScoreRequest, tokens: np.ndarray, n: int) -> list[Message]:
        if n >= 8:
            return [valid_reply(request, tokens)]
        held.append((request, tokens))
        if len(held) < 2:
            return []
        (first, first_tokens), (second, second_tokens) = held
        held.clear()
        return [
            valid_reply(first, first_tokens, request_id=second.request_id),
            valid_reply(second, second_tokens, request_id=first.request_id),
        ]

    order, stats = run(script, n=8, response=(20, 20))  # so that they differ in their tokens alone
    assert sorted(order) == list(range(8)) and stats.n_damaged == 8


def test_an_unreadable_request_or_reply_is_retried_at_once() -> None:
    """Fails if a flipped bit in a header costs a whole request_timeout_s."""
    repaired = threading.Event()

    def script(request: ScoreRequest, tokens: np.ndarray, n: int) -> list[Message]:
        if repaired.is_set():
            return [valid_reply(request, tokens)]
        if n == 0:
            return one(ErrorReply(request_id=NO_REQUEST, code="damaged", text="scripted"))
        repaired.set()
        return [[b"GKT\x01 flipped bits", *valid_reply(request, tokens)[1:]]]

    started_s = time.monotonic()
    order, stats = run(script, n=1, request_timeout_s=60.0)
    assert order == [0] and stats.n_resent == 2
    assert time.monotonic() - started_s < 30


def test_another_model_on_the_same_address_ends_the_run() -> None:
    """Fails if a server restarted with other weights changes the teacher in the middle of a run."""
    with pytest.raises(TeacherError, match="model-b.*model-a"):
        run(
            lambda request, tokens, n: [
                valid_reply(request, tokens, model_fingerprint="model-b" if n == 7 else "model-a")
            ]
        )
    with pytest.raises(TeacherError, match="model-a.*model-x"):
        run(always_valid, fingerprint="model-x")


def test_another_model_is_named() -> None:
    """Fails if the error about a teacher that was replaced during a run has only digests, and not the models' names."""
    other = {"model_fingerprint": "model-b"}
    with ScriptedServer(lambda r, t, n: [valid_reply(r, t, **other)], info={**other, "model_name": "new"}) as server:
        config = load_config(None, [f"teacher.server_port={server.port}", f"teacher.topk={K}"])
        endpoint = ScoringEndpoint(config, Comparison(N_VOCAB), ["model-a"], [Window(4, 1)], names=["old"])
        with pytest.raises(TeacherError, match=r"new \(model-b\).*model-a \(old\)"):
            endpoint.score(random_rollouts(2, N_VOCAB))
        endpoint.clients()[0].close()


def test_invalid_scores_end_the_run() -> None:
    """Fails if a reply with ids outside the vocabulary reaches the loss."""
    with pytest.raises(TeacherError, match=r"prompt .*'w0'.*\[0, 20\)"):
        run(always_valid, n_vocab=20)


# Requests


def test_requests_carry_the_teachers_name_and_info_its_description() -> None:
    """Fails if a request can be scored by another teacher, or the description lacks its limits."""
    with ScriptedServer(always_valid) as server, client(server, name="math") as teacher:
        info = teacher.info()
        list(score(teacher, random_rollouts(1, N_VOCAB)))
    assert (info.teacher, info.n_streams, info.hidden_size, info.dtype) == ("math", 24, 6, "float32")
    assert {request.teacher for request in server.seen if not isinstance(request, Cancel)} == {"math"}


def test_a_missed_mass_target_is_an_error() -> None:
    """Fails if the teacher can omit more of the distribution than the target allows."""
    with (
        ScriptedServer(always_valid) as server,
        client(server) as teacher,
        pytest.raises(TeacherError, match="1 of 8 .*0.5.*0.9"),
    ):
        submit(teacher, random_rollouts(1, N_VOCAB)[0], mass=0.9).result(timeout=30)


def test_bad_keys_are_config_errors() -> None:
    """Fails if wrong keys are only detected by the server, after the rollouts."""
    with refuses("teacher.keys"):
        connect(15555, keys="no/such/folder")
