"""Real processes that die at bad moments: every sequence is still answered, and nothing is left running."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest

from gkd.errors import TeacherUnavailable
from tests.service.conftest import TINY_VOCAB, WIDE_VOCAB
from tests.service.harness import ServerProcess, connect, is_alive, random_rollouts, wait_until

pytestmark = pytest.mark.service


def test_a_killed_worker_loses_nothing(wide_model: Path, tmp_path: Path) -> None:
    """Would break if requests at a dead worker waited for it, were answered twice, or if it was not replaced."""
    rollouts = random_rollouts(60, WIDE_VOCAB, response=(40, 80))
    with ServerProcess(wide_model, tmp_path, n_workers=2, options=("--max-batch-tokens", "1024")) as server:
        # Far longer than the test: what is answered came from the broker's retry, not from the client's.
        teacher = connect(server.port, k=16, n_in_flight=40, request_timeout_s=300.0)
        try:
            scores = teacher.score(rollouts)
            first = next(scores)
            assert teacher.stats.n_sent == 40, "the window should be in flight"
            os.kill(server.worker_pids[0], signal.SIGKILL)
            indices = [first[0], *(index for index, _ in scores)]
            assert sorted(indices) == list(range(60))
            assert teacher.stats.n_resent == 0
            assert re.search(r"lost w0\.0 \(its process ended\); [1-9]\d* requests go elsewhere", server.log_text())
            wait_until(lambda: teacher.info().n_workers == 2, 60.0, "another worker")
        finally:
            teacher.close()


def test_a_full_queue_only_delays(tiny_model: Path, tmp_path: Path) -> None:
    """Would break if a server told to bound its memory dropped requests, or kept a waiting client out for ever."""
    rollouts = random_rollouts(3000, TINY_VOCAB, response=(1, 5))
    with ServerProcess(tiny_model, tmp_path, options=("--max-queue-mib", "1", "--max-batch-tokens", "512")) as server:
        teacher = connect(server.port, n_in_flight=3000)
        try:
            assert sorted(index for index, _ in teacher.score(rollouts)) == list(range(3000))
        finally:
            teacher.close()
    assert teacher.stats.n_busy > 0


def test_a_restarted_server_is_asked_again(tiny_model: Path, tmp_path: Path) -> None:
    """Would break if the client waited for replies that a dead server can no longer send."""
    rollouts = random_rollouts(200, TINY_VOCAB, response=(60, 120))
    with ServerProcess(tiny_model, tmp_path, options=("--max-batch-tokens", "256")) as server:
        teacher = connect(server.port, n_in_flight=64, request_timeout_s=300.0)
        scores = teacher.score(rollouts)
        indices = [next(scores)[0] for _ in range(3)]
        server.kill()
    with ServerProcess(tiny_model, tmp_path, port=server.port):
        try:
            indices += [index for index, _ in scores]
        finally:
            teacher.close()
    assert sorted(indices) == list(range(200))
    assert teacher.stats.n_server_restarts == 1 and teacher.stats.n_resent > 0


def test_an_absent_server_is_named_within_its_budget() -> None:
    """Would break if a run hung, or ended with words that do not say which address and what to do."""
    teacher = connect(1, outage_budget_s=0.5)
    started_s = time.monotonic()
    try:
        with pytest.raises(TeacherUnavailable) as caught:
            list(teacher.score(random_rollouts(3, 10)))
        with pytest.raises(TeacherUnavailable):
            teacher.info()
    finally:
        teacher.close()
    assert time.monotonic() - started_s < 3
    for words in ("tcp://127.0.0.1:1", "last heard: never", "python -m teacher_server --model PATH"):
        assert words in str(caught.value)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_everything_in_time(tiny_model: Path, tmp_path: Path, number: signal.Signals) -> None:
    """Would break if a stopped server left a worker with its GPU memory behind, or took longer than 3 s."""
    with ServerProcess(tiny_model, tmp_path) as server:
        started_s = time.monotonic()
        server.process.send_signal(number)
        assert server.process.wait(timeout=3) == 0
        assert time.monotonic() - started_s < 3
        assert not any(is_alive(pid) for pid in server.worker_pids)
        assert not list(tmp_path.glob("*.json")), "the ready file says that nobody is ready"


def test_workers_die_with_a_killed_server(tiny_model: Path, tmp_path: Path) -> None:
    """Would break if kill -9 of the server orphaned its workers."""
    with ServerProcess(tiny_model, tmp_path) as server:
        assert all(is_alive(pid) for pid in server.worker_pids)
        server.kill()
        wait_until(lambda: not any(is_alive(pid) for pid in server.worker_pids), 2.0, "the workers' end")
