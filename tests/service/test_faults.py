"""Real processes that are killed or restarted: every sequence is completed, and no process is left running."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest

from gkd.errors import TeacherUnavailable
from tests.processes import is_alive, wait_until
from tests.service.conftest import TINY_VOCAB, WIDE_VOCAB
from tests.service.harness import TRIVIAL, ServerProcess, connect, random_rollouts, score, trivial_model

pytestmark = pytest.mark.service


def test_a_killed_worker_loses_nothing(wide_model: Path, tmp_path: Path) -> None:
    """Fails if requests of a dead worker wait for it or are completed twice, or if it is not replaced."""
    rollouts = random_rollouts(60, WIDE_VOCAB, response=(40, 80))
    with ServerProcess(wide_model, tmp_path, n_workers=2, options=("--max-batch-tokens", "1024")) as server:
        # The time-out is far longer than the test, so every retry comes from the broker, not from the client.
        teacher = connect(server.port, k=16, n_in_flight=40, request_timeout_s=300.0)
        try:
            scores = score(teacher, rollouts)
            first = next(scores)
            assert teacher.stats.n_sent >= 40, "the window should be in flight"
            os.kill(server.worker_pids[0], signal.SIGKILL)
            indices = [first[0], *(index for index, _ in scores)]
            assert sorted(indices) == list(range(60))
            assert teacher.stats.n_resent == 0
            assert re.search(r"lost worker w0\.0 .*; [1-9]\d* requests", server.log_text())
            wait_until(lambda: teacher.info().n_workers == 2, 60.0, "the new worker")
        finally:
            teacher.close()


def test_a_full_queue_only_delays(tiny_model: Path, tmp_path: Path) -> None:
    """Fails if a server with a small queue drops requests, or refuses a waiting client forever."""
    rollouts = random_rollouts(3000, TINY_VOCAB, response=(1, 5))
    with ServerProcess(tiny_model, tmp_path, options=("--max-queue-mib", "1", "--max-batch-tokens", "512")) as server:
        teacher = connect(server.port, n_in_flight=3000)
        try:
            assert sorted(index for index, _ in score(teacher, rollouts)) == list(range(3000))
        finally:
            teacher.close()
    assert teacher.stats.n_busy > 0


def test_pending_requests_are_sent_again_to_a_restarted_server(tiny_model: Path, tmp_path: Path) -> None:
    """Fails if the client waits for replies of the dead server."""
    rollouts = random_rollouts(200, TINY_VOCAB, response=(60, 120))
    with ServerProcess(tiny_model, tmp_path, options=("--max-batch-tokens", "256")) as server:
        teacher = connect(server.port, n_in_flight=64, request_timeout_s=300.0)
        scores = score(teacher, rollouts)
        indices = [next(scores)[0] for _ in range(3)]
        server.kill()
    with ServerProcess(tiny_model, tmp_path, port=server.port):
        try:
            indices += [index for index, _ in scores]
        finally:
            teacher.close()
    assert sorted(indices) == list(range(200))
    assert teacher.stats.n_server_restarts == 1 and teacher.stats.n_resent > 0


def test_an_absent_server_is_an_error_within_the_outage_budget() -> None:
    """Fails if a run hangs without a server, or its error lacks the address and the fix."""
    teacher = connect(1, outage_budget_s=0.5)
    started_s = time.monotonic()
    try:
        with pytest.raises(TeacherUnavailable) as caught:
            list(score(teacher, random_rollouts(3, 10)))
        with pytest.raises(TeacherUnavailable):
            teacher.info()
    finally:
        teacher.close()
    assert time.monotonic() - started_s < 3
    assert "127.0.0.1:1" in str(caught.value) and "launch/teacher.sh" in str(caught.value)


# The engine decides how long a worker takes to exit, the number which handler begins it: one case with a real model.
@pytest.mark.parametrize(
    ("number", "engine"), [(signal.SIGTERM, "hf"), (signal.SIGINT, TRIVIAL[1])], ids=["hf", "trivial"]
)
def test_a_signal_ends_everything_in_time(
    tiny_model: Path, tmp_path: Path, number: signal.Signals, engine: str
) -> None:
    """Fails if a stopped server leaves a worker and its GPU memory behind, or takes longer than 3 s."""
    with ServerProcess(tiny_model, tmp_path, options=("--engine", engine)) as server:
        started_s = time.monotonic()
        server.process.send_signal(number)
        assert server.process.wait(timeout=3) == 0
        assert time.monotonic() - started_s < 3
        assert not any(is_alive(pid) for pid in server.worker_pids)
        assert not list(tmp_path.glob("*.json")), "the ready file must be removed"


def test_workers_die_with_a_killed_server(tmp_path: Path) -> None:
    """Fails if workers survive a kill -9 of the server."""
    # The exit of workers with a real model is in test_pending_requests_are_sent_again_to_a_restarted_server.
    with ServerProcess(trivial_model(tmp_path / "m"), tmp_path, options=TRIVIAL) as server:
        assert all(is_alive(pid) for pid in server.worker_pids)
        server.kill()
        wait_until(lambda: not any(is_alive(pid) for pid in server.worker_pids), 2.0, "exit of the workers")
