"""Real processes that are killed or restarted: every sequence is completed, and no process is left running."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from tests.processes import is_alive, wait_until
from tests.service.harness import (
    PATIENT,
    TRIVIAL,
    ServerProcess,
    connect,
    random_rollouts,
    score,
    submit,
    table_of,
    trivial_model,
)

pytestmark = pytest.mark.service
N_VOCAB = 1000


def test_a_killed_worker_loses_nothing(tmp_path: Path) -> None:
    """Fails if requests of a dead worker wait for it or are completed twice, or if it is not replaced."""
    rollouts = random_rollouts(60, N_VOCAB, response=(40, 80))
    with (
        ServerProcess(trivial_model(tmp_path / "m"), tmp_path, n_workers=2, options=PATIENT) as server,
        # The time-out is far longer than the test, so every retry comes from the broker, not from the client.
        connect(server.port, n_in_flight=60, request_timeout_s=300.0) as teacher,
    ):
        os.kill(server.worker_pids[0], signal.SIGSTOP)  # keeps its requests unfinished
        scores = score(teacher, rollouts)
        first = next(scores)
        os.kill(server.worker_pids[0], signal.SIGKILL)
        assert sorted([first[0], *(index for index, _ in scores)]) == list(range(60))
        assert teacher.stats.n_resent == 0
        assert re.search(r"lost worker w0\.0 .*; [1-9]\d* requests", server.log_text())
        wait_until(lambda: teacher.info().n_workers == 2, 60.0, "the new worker")


def test_a_full_queue_only_delays(tmp_path: Path) -> None:
    """Fails if a server with a small queue drops requests, or refuses a waiting client forever."""
    rollouts = random_rollouts(200, N_VOCAB, response=(3000, 3000))  # 12 kB each
    with (
        ServerProcess(trivial_model(tmp_path / "m"), tmp_path, options=(*PATIENT, "--max-queue-mib", "1")) as server,
        connect(server.port, n_in_flight=200) as teacher,
    ):
        os.kill(server.worker_pids[0], signal.SIGSTOP)
        futures = [submit(teacher, rollout) for rollout in rollouts]
        wait_until(lambda: teacher.stats.n_busy > 0, 20.0, "a full queue")
        os.kill(server.worker_pids[0], signal.SIGCONT)
        for rollout, future in zip(rollouts, futures, strict=True):
            assert len(table_of(future.result(timeout=60)).ids) == len(rollout.response_ids)


def test_pending_requests_are_sent_again_to_a_restarted_server(tmp_path: Path) -> None:
    """Fails if the client waits for replies of the dead server, or workers survive a kill -9 of it."""
    rollouts, model = random_rollouts(64, N_VOCAB), trivial_model(tmp_path / "m")
    with ServerProcess(model, tmp_path, options=PATIENT) as server:
        teacher = connect(server.port, n_in_flight=64, request_timeout_s=300.0)
        teacher.info()
        os.kill(server.worker_pids[0], signal.SIGSTOP)
        futures = [submit(teacher, rollout) for rollout in rollouts]
        wait_until(lambda: teacher.stats.n_sent >= len(rollouts), 20.0, "requests at the server")
        server.kill()
        wait_until(lambda: not any(is_alive(pid) for pid in server.worker_pids), 30.0, "exit of the workers")
    with teacher, ServerProcess(model, tmp_path, port=server.port, options=TRIVIAL):
        for rollout, future in zip(rollouts, futures, strict=True):
            assert len(table_of(future.result(timeout=60)).ids) == len(rollout.response_ids)
    assert teacher.stats.n_server_restarts == 1 and teacher.stats.n_resent > 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_everything(tmp_path: Path, number: signal.Signals) -> None:
    """Fails if a stopped server does not end, or leaves a worker and its GPU memory behind."""
    with ServerProcess(trivial_model(tmp_path / "m"), tmp_path, options=TRIVIAL) as server:
        server.process.send_signal(number)
        assert server.process.wait(timeout=30) == 0
        assert not any(is_alive(pid) for pid in server.worker_pids)
        assert not list(tmp_path.glob("*.json")), "the ready file must be removed"
