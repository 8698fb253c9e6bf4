"""The client with a server that is silent, stuck, restarted, unreachable, or refuses the key."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from gkd.errors import TeacherUnavailable
from gkd.types import TeacherHealth
from teacher_server.cli.keygen import make_keys
from teacher_server.wire.keys import load_server_keys
from teacher_server.wire.protocol import ScoreRequest
from tests.processes import wait_until
from tests.service.harness import connect, random_rollouts, score, submit
from tests.service.scripted import (
    N_VOCAB,
    Message,
    ScriptedServer,
    always_valid,
    client,
    error,
    ignore,
    run,
    valid_reply,
)

pytestmark = pytest.mark.service
ROOT = Path(__file__).resolve().parents[2]


def test_a_stuck_server_with_heartbeats_is_an_outage() -> None:
    """Fails if heartbeats alone keep a run waiting forever."""
    started_s = time.monotonic()
    with pytest.raises(TeacherUnavailable) as caught:
        run(ignore, n_in_flight=4, request_timeout_s=0.2, outage_budget_s=0.7)
    assert time.monotonic() - started_s < 60
    assert "tcp://127.0.0.1:" in str(caught.value)


@pytest.mark.parametrize("code", ["busy", "draining"])
def test_a_server_that_only_replies_busy_is_an_outage(code: str) -> None:
    """Fails if retries count as progress, or if the error lacks the server's last error."""
    with pytest.raises(TeacherUnavailable, match=f"{code}.*scripted"):
        run(lambda request, tokens, n: [error(request, code, 0.1)], request_timeout_s=0.2, outage_budget_s=0.3)


def test_the_client_counts_the_silence_of_the_server() -> None:
    """Fails if the terminal of a run cannot show how long the teacher has been silent, its queue, or its workers."""
    with ScriptedServer(ignore) as server, client(server, outage_budget_s=60.0) as teacher:
        assert teacher.health().silent_s == 0.0, "without pending requests nobody waits"
        futures = [submit(teacher, rollout) for rollout in random_rollouts(3, N_VOCAB)]
        wait_until(lambda: teacher.health().n_workers == 1, 30.0, "a heartbeat")
        server.replies_to_pings = False
        wait_until(lambda: teacher.health().silent_s > 1.0, 30.0, "the silence")
        health = teacher.health()
        assert (health.budget_s, health.n_in_flight, health.n_queued) == (60.0, 3, 0)
        server.replies_to_pings = True
        wait_until(lambda: teacher.health().silent_s < 1.0, 30.0, "the end of the silence")
        assert not any(future.done() for future in futures)
        other = TeacherHealth(9.0, 60.0, 4, 0, 7)
        assert TeacherHealth.merged([health, other]) == TeacherHealth(9.0, 60.0, 7, 1, 0)
        assert TeacherHealth.merged([]) is None


def test_the_client_can_be_used_after_an_outage() -> None:
    """Fails if an outage blocks the client, or threads that wait for it."""
    with ScriptedServer(ignore) as server, client(server, outage_budget_s=0.4, request_timeout_s=30.0) as teacher:
        server.replies_to_pings = False
        futures = [submit(teacher, rollout) for rollout in random_rollouts(3, N_VOCAB)]
        for future in futures:
            with pytest.raises(TeacherUnavailable):
                future.result(timeout=30)
        server.replies_to_pings, server.script = True, always_valid
        assert len(dict(score(teacher, random_rollouts(3, N_VOCAB)))) == 3


def test_time_without_pending_requests_is_not_an_outage() -> None:
    """Fails if a trainer in a long step, or a paused process, counts its own pause as an outage."""
    with ScriptedServer(always_valid) as server, client(server, outage_budget_s=0.4, request_timeout_s=5.0) as teacher:
        for _ in range(2):
            assert submit(teacher, random_rollouts(1, N_VOCAB)[0]).result(timeout=30)
            time.sleep(0.8)
        assert teacher.stats.n_resent == 0


def test_a_restart_is_detected_by_its_epoch() -> None:
    """Fails if the client waits request_timeout_s for a restarted server that has lost its requests."""
    with ScriptedServer(ignore) as server, client(server, request_timeout_s=60.0) as teacher:
        future = submit(teacher, random_rollouts(1, N_VOCAB)[0])
        wait_until(lambda: server.of(ScoreRequest), 30.0, "the request")
        wait_until(lambda: teacher.health().n_workers, 30.0, "a pong, which has the first epoch")
        server.script = always_valid
        server.epoch = os.urandom(16)  # over the same connection, as with a proxy
        assert future.result(timeout=30)
        assert teacher.stats.n_server_restarts == 1 and teacher.stats.n_resent == 1
        assert len({request.request_id for request in server.of(ScoreRequest)}) == 1


@pytest.mark.parametrize("restarts", [False, True])
def test_requests_lost_with_a_connection_are_sent_again_at_once(restarts: bool) -> None:
    """Fails if a broken connection costs request_timeout_s, or resends have a new id."""
    with ScriptedServer(ignore) as server, client(server, request_timeout_s=60.0) as teacher:
        futures = [submit(teacher, rollout) for rollout in random_rollouts(5, N_VOCAB)]
        wait_until(lambda: len(server.of(ScoreRequest)) == 5, 30.0, "the requests")
        wait_until(lambda: teacher.health().n_workers, 30.0, "a pong, which has the first epoch")
        server.script = always_valid
        started_s = time.monotonic()
        server.reconnect(epoch=os.urandom(16) if restarts else b"")
        for future in futures:
            assert future.result(timeout=30)
        assert time.monotonic() - started_s < 30
        assert teacher.stats.n_resent == 5 and teacher.stats.n_server_restarts == restarts
        assert len({request.request_id for request in server.of(ScoreRequest)}) == 5
        assert len(server.identities) == 1


def test_requests_are_sent_again_after_a_silence() -> None:
    """Fails if requests lost in a network partition without a disconnect wait for request_timeout_s."""
    with ScriptedServer(ignore) as server, client(server, request_timeout_s=60.0) as teacher:
        future = submit(teacher, random_rollouts(1, N_VOCAB)[0])
        wait_until(lambda: server.of(ScoreRequest), 30.0, "the request")
        server.replies_to_pings = False
        wait_until(lambda: teacher.health().silent_s > 1.5, 30.0, "the silence")
        server.replies_to_pings, server.script = True, always_valid
        assert future.result(timeout=30)


def test_a_stopped_trainer_process_is_not_an_outage() -> None:
    """Fails if a suspended machine or a debugger ends the run: the trainer itself was stopped."""
    with ScriptedServer(ignore) as server:
        code = (
            "from tests.service.harness import connect, random_rollouts, score\n"
            f"teacher = connect({server.port}, n_vocab={N_VOCAB}, outage_budget_s=0.8, request_timeout_s=0.2)\n"
            f"assert len(dict(score(teacher, random_rollouts(3, {N_VOCAB})))) == 3\n"
            "teacher.close()\n"
        )
        process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, cwd=ROOT)
        try:
            wait_until(lambda: len(server.of(ScoreRequest)) >= 3, 20.0, "the requests")
            process.send_signal(signal.SIGSTOP)
            time.sleep(1.6)
            server.script = always_valid
            process.send_signal(signal.SIGCONT)
            _, output = process.communicate(timeout=30)
        finally:
            process.kill()
            process.wait(timeout=30)
        assert process.returncode == 0, output


def test_the_client_reconnects_after_an_oversize_frame() -> None:
    """Fails if the client relies on ZMQ to reconnect: after a protocol error it never does."""

    def script(request: ScoreRequest, tokens: np.ndarray, n: int) -> list[Message]:
        return [[b"x" * (5 << 20)]] if n == 0 else [valid_reply(request, tokens)]

    order, stats = run(script, n=1, request_timeout_s=60.0)
    assert order == [0] and stats.n_resent == 1


# Keys


def test_a_refused_key_is_reported_and_retried(tmp_path: Path) -> None:
    """Fails if a refused key gives the error of an absent server, or if a key added later is not tried again."""
    make_keys(tmp_path, ["trainer"], [])
    allowed = tmp_path / "clients" / "trainer.key"
    text = allowed.read_text()
    allowed.unlink()
    options = {"keys": str(tmp_path / "bundles" / "trainer"), "outage_budget_s": 0.8}
    with ScriptedServer(always_valid, load_server_keys(tmp_path)) as server, client(server, **options) as teacher:
        with pytest.raises(TeacherUnavailable, match=r"teacher\.keys") as caught:
            teacher.info()
        assert "server.key" not in str(caught.value), "that is the error of another server's key"
        assert "--model" not in str(caught.value), "a second server on this port"
        allowed.write_text(text)
        assert server.authenticator is not None and server.authenticator.maybe_reload()
        assert teacher.info().n_workers == 2


@pytest.mark.parametrize(
    "server_keys,client_keys,token",
    [("a", "b", r"server\.key"), ("", "a", r"server\.key"), ("a", "", r"teacher\.keys")],
)
def test_keys_of_another_server_are_reported(tmp_path: Path, server_keys: str, client_keys: str, token: str) -> None:
    """Fails if the error of a failed handshake lacks the keys as the cause."""
    for name in ("a", "b"):
        make_keys(tmp_path / name, ["trainer"], [])
    keys = load_server_keys(tmp_path / server_keys) if server_keys else None
    bundle = str(tmp_path / client_keys / "bundles" / "trainer") if client_keys else ""
    with (
        ScriptedServer(always_valid, keys) as server,
        client(server, keys=bundle, outage_budget_s=0.4) as teacher,
        pytest.raises(TeacherUnavailable, match=token),
    ):
        teacher.info()


def test_another_service_on_the_port_is_reported() -> None:
    """Fails if a wrong port gives the error of an absent server."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with contextlib.suppress(OSError):  # closed at the end of the test
                while True:
                    connection, _ = listener.accept()
                    connection.recv(64)
                    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                    connection.close()

        threading.Thread(target=serve, daemon=True).start()
        with (
            connect(listener.getsockname()[1], outage_budget_s=0.4) as teacher,
            pytest.raises(TeacherUnavailable, match=r"teacher\.keys"),
        ):
            teacher.info()
        listener.shutdown(socket.SHUT_RDWR)
