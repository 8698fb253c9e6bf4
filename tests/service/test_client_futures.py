"""One client used by many threads: windows, backpressure, cancellation, close."""

from __future__ import annotations

import threading
import time
from concurrent.futures import CancelledError, Future, as_completed

import numpy as np
import pytest

from gkd.errors import TeacherError
from gkd.scoring.teacher.client import ZmqTeacher
from gkd.types import TeacherScores
from teacher_server.wire.protocol import Cancel, ScoreRequest
from tests.processes import wait_until
from tests.service.harness import random_rollouts, score, submit, table_of
from tests.service.scripted import N_VOCAB, Message, ScriptedServer, always_valid, client, ignore, valid_reply

pytestmark = pytest.mark.service


def test_many_threads_use_one_client() -> None:
    """Fails if replies of two threads can be swapped, or several threads use the socket."""
    rollouts = random_rollouts(120, N_VOCAB)
    problems: list[str] = []

    def work(teacher: ZmqTeacher, part: int) -> None:
        mine = rollouts[part::6]
        if part % 2:
            got = dict(score(teacher, mine))
        else:
            futures = [submit(teacher, rollout) for rollout in mine]
            got = {index: table_of(future.result(timeout=30)) for index, future in enumerate(futures)}
        problems.extend(
            f"{part}: {index}"
            for index, rollout in enumerate(mine)
            if not np.array_equal(got[index].ids[:, 0], rollout.response_ids)
        )

    with ScriptedServer(always_valid) as server, client(server, n_in_flight=16) as teacher:
        threads = [threading.Thread(target=work, args=(teacher, part)) for part in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=30)
    assert not problems
    assert teacher.stats.n_sent == 120 and len(server.identities) == 1


def test_requests_above_the_window_wait_in_the_client() -> None:
    """Fails if a client can flood the server, or if `submit` never blocks and memory grows."""
    held: list[tuple[ScoreRequest, np.ndarray]] = []

    def script(request: ScoreRequest, tokens: np.ndarray, n: int) -> list[Message]:
        held.append((request, tokens))
        return []

    rollouts = random_rollouts(12, N_VOCAB)
    futures: list[Future[list[TeacherScores]]] = []
    with ScriptedServer(script) as server, client(server, n_in_flight=3, max_waiting=4) as teacher:
        thread = threading.Thread(target=lambda: futures.extend(submit(teacher, rollout) for rollout in rollouts))
        thread.start()
        wait_until(lambda: len(futures) == 7 and len(held) == 3, 30.0, "three in flight and four waiting")
        assert teacher.info().n_streams == 24, "an info request must not wait for the window"
        assert len(futures) == 7 and len(held) == 3, "`submit` must block on the fifth waiting request"
        server.script = always_valid
        identity = next(iter(server.identities))
        server.do(lambda: server.send(identity, [valid_reply(*request) for request in held]))
        thread.join(timeout=30)
        assert len(futures) == 12 and all(future.result(timeout=30) for future in futures)


def test_a_cancelled_future_is_cancelled_on_the_server() -> None:
    """Fails if the teacher continues a cancelled request, or its late reply has an effect."""
    held: list[Message] = []

    def script(request: ScoreRequest, tokens: np.ndarray, n: int) -> list[Message]:
        if n == 0:
            held.append(valid_reply(request, tokens))
            return []
        return [*held, valid_reply(request, tokens)]

    rollouts = random_rollouts(3, N_VOCAB)
    with ScriptedServer(script) as server, client(server, n_in_flight=1) as teacher:
        sent, waiting, last = (submit(teacher, rollout) for rollout in rollouts)
        wait_until(lambda: server.of(ScoreRequest), 30.0, "the request")
        assert waiting.cancel() and sent.cancel()
        assert last.result(timeout=30)
        assert [c.request_id for c in server.of(Cancel)] == [server.of(ScoreRequest)[0].request_id]
        assert len(server.of(ScoreRequest)) == 2, "a request cancelled while it waits must not be sent"
        assert teacher.stats.n_cancelled == 2 and teacher.stats.n_unwanted == 1
        with pytest.raises(CancelledError):
            sent.result()


def test_close_fails_pending_futures() -> None:
    """Fails if a thread that waits for a future hangs when another thread closes the client."""
    with ScriptedServer(ignore) as server:
        teacher = client(server, n_in_flight=2)
        futures = [submit(teacher, rollout) for rollout in random_rollouts(5, N_VOCAB)]
        wait_until(lambda: len(server.of(ScoreRequest)) == 2, 30.0, "the requests")
        started_s = time.monotonic()
        teacher.close()
        teacher.close()
        assert time.monotonic() - started_s < 30
        for future in futures:
            with pytest.raises(TeacherError):
                future.result(timeout=0)
        with pytest.raises(TeacherError):
            submit(teacher, random_rollouts(1, N_VOCAB)[0])
        wait_until(lambda: len(server.of(Cancel)) == 2, 30.0, "the cancellations")


def test_a_callback_may_submit_and_close() -> None:
    """Fails if a callback, which runs in the client's thread, can deadlock with that thread."""
    rollouts = random_rollouts(6, N_VOCAB)
    results: list[Future[list[TeacherScores]]] = []
    finished = threading.Event()
    with ScriptedServer(always_valid) as server:
        teacher = client(server, n_in_flight=1, max_waiting=1)

        def again(future: Future[list[TeacherScores]]) -> None:
            results.append(future)
            if len(results) == 6:
                teacher.close()
                finished.set()
            elif len(results) == 1:
                for rollout in rollouts[1:]:
                    submit(teacher, rollout).add_done_callback(again)

        submit(teacher, rollouts[0]).add_done_callback(again)
        assert finished.wait(30)
        teacher.close()
        assert all(future.result(timeout=0) for future in as_completed(results))
