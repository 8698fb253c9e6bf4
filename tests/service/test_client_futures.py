"""One client used by many: windows, backpressure, cancellation, close."""

from __future__ import annotations

import threading
import time
from concurrent.futures import CancelledError, Future, as_completed

import numpy as np
import pytest

from gkd.errors import TeacherError
from gkd.teacher.client import ZmqTeacher
from gkd.types import TeacherTopK
from teacher_server.wire.protocol import Cancel, ScoreRequest
from tests.service.harness import random_rollouts, wait_until
from tests.service.scripted import N_VOCAB, Message, ScriptedServer, answer, client, honest, ignore

pytestmark = pytest.mark.service


def test_many_threads_use_one_client() -> None:
    """Would break if two threads' answers could meet, or the socket were touched by more than one thread."""
    rollouts = random_rollouts(120, N_VOCAB)
    problems: list[str] = []

    def work(teacher: ZmqTeacher, part: int) -> None:
        mine = rollouts[part::6]
        if part % 2:
            got = dict(teacher.score(mine))
        else:
            futures = [teacher.submit(rollout) for rollout in mine]
            got = {index: future.result(timeout=20) for index, future in enumerate(futures)}
        problems.extend(
            f"{part}: {index}"
            for index, rollout in enumerate(mine)
            if not np.array_equal(got[index].topk_ids[:, 0], rollout.response_ids)
        )

    with ScriptedServer(answer) as server, client(server, n_in_flight=16) as teacher:
        threads = [threading.Thread(target=work, args=(teacher, part)) for part in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=30)
    assert not problems
    assert teacher.stats.n_sent == 120 and len(server.identities) == 1


def test_the_window_is_kept_and_the_rest_waits_here() -> None:
    """Would break if a client could flood the server, or if `submit` never blocked and memory grew."""
    held: list[tuple[ScoreRequest, np.ndarray]] = []

    def script(request: ScoreRequest, tokens: np.ndarray, n: int) -> list[Message]:
        held.append((request, tokens))
        return []

    rollouts = random_rollouts(12, N_VOCAB)
    futures: list[Future[TeacherTopK]] = []
    with ScriptedServer(script) as server, client(server, n_in_flight=3, max_waiting=4) as teacher:
        thread = threading.Thread(target=lambda: futures.extend(teacher.submit(rollout) for rollout in rollouts))
        thread.start()
        wait_until(lambda: len(futures) == 7, 5.0, "three on the wire and four waiting")
        time.sleep(0.2)
        assert len(futures) == 7 and len(held) == 3, "the fifth one that waits must block"
        assert teacher.info().n_streams == 24, "a description must not wait for the window"
        server.script = answer
        identity = next(iter(server.identities))
        server.do(lambda: server.send(identity, [honest(*request) for request in held]))
        thread.join(timeout=5)
        assert len(futures) == 12 and all(future.result(timeout=5) for future in futures)


def test_a_cancelled_future_is_cancelled_at_the_server_too() -> None:
    """Would break if the teacher went on scoring what nobody waits for, or its late answer did harm."""
    held: list[Message] = []

    def script(request: ScoreRequest, tokens: np.ndarray, n: int) -> list[Message]:
        if n == 0:
            held.append(honest(request, tokens))
            return []
        return [*held, honest(request, tokens)]

    rollouts = random_rollouts(3, N_VOCAB)
    with ScriptedServer(script) as server, client(server, n_in_flight=1) as teacher:
        sent, waiting, last = (teacher.submit(rollout) for rollout in rollouts)
        wait_until(lambda: server.of(ScoreRequest), 5.0, "the request")
        assert waiting.cancel() and sent.cancel()
        assert last.result(timeout=5)
        assert [c.request_id for c in server.of(Cancel)] == [server.of(ScoreRequest)[0].request_id]
        assert len(server.of(ScoreRequest)) == 2, "what was cancelled before its turn is never sent"
        assert teacher.stats.n_cancelled == 2 and teacher.stats.n_unwanted == 1
        with pytest.raises(CancelledError):
            sent.result()


def test_leaving_a_score_early_cancels_the_rest() -> None:
    """Would break if an abandoned call kept its place in the window, or mixed into the next one."""

    def script(request: ScoreRequest, tokens: np.ndarray, n: int) -> list[Message]:
        return [honest(request, tokens)] if n == 0 or n >= 4 else []

    with ScriptedServer(script) as server, client(server, n_in_flight=4) as teacher:
        scores = teacher.score(random_rollouts(9, N_VOCAB))
        next(scores)
        scores.close()  # type: ignore[attr-defined]
        assert len(dict(teacher.score(random_rollouts(6, N_VOCAB, seed=1)))) == 6
        assert len(server.of(Cancel)) == 3


def test_close_fails_what_is_outstanding() -> None:
    """Would break if a thread that waits for a future hung for ever when another one closes the client."""
    with ScriptedServer(ignore) as server:
        teacher = client(server, n_in_flight=2)
        futures = [teacher.submit(rollout) for rollout in random_rollouts(5, N_VOCAB)]
        wait_until(lambda: len(server.of(ScoreRequest)) == 2, 5.0, "the requests")
        started_s = time.monotonic()
        teacher.close()
        teacher.close()
        assert time.monotonic() - started_s < 2
        for future in futures:
            with pytest.raises(TeacherError, match="closed; 5 requests"):
                future.result(timeout=0)
        with pytest.raises(TeacherError, match="closed"):
            teacher.submit(random_rollouts(1, N_VOCAB)[0])
        wait_until(lambda: len(server.of(Cancel)) == 2, 2.0, "the cancellations")


def test_a_callback_may_submit_and_close() -> None:
    """Would break if a callback, which runs in the client's own thread, could wait for that very thread."""
    rollouts = random_rollouts(6, N_VOCAB)
    results: list[Future[TeacherTopK]] = []
    finished = threading.Event()
    with ScriptedServer(answer) as server:
        teacher = client(server, n_in_flight=1, max_waiting=1)

        def again(future: Future[TeacherTopK]) -> None:
            results.append(future)
            if len(results) == 6:
                teacher.close()
                finished.set()
            elif len(results) == 1:
                for rollout in rollouts[1:]:
                    teacher.submit(rollout).add_done_callback(again)

        teacher.submit(rollouts[0]).add_done_callback(again)
        assert finished.wait(10)
        teacher.close()
        assert all(future.result(timeout=0) for future in as_completed(results))
