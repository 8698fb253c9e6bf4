"""A server that is silent, stuck, restarted, unreachable or refuses the key: what the client makes of it."""

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
from teacher_server.cli.keygen import make_keys
from teacher_server.wire.keys import load_server_keys
from teacher_server.wire.protocol import ScoreRequest
from tests.service.harness import connect, random_rollouts, wait_until
from tests.service.scripted import N_VOCAB, Message, ScriptedServer, answer, client, error, honest, ignore, run

pytestmark = pytest.mark.service
ROOT = Path(__file__).resolve().parents[2]


def test_an_alive_but_stuck_server_is_given_up() -> None:
    """Would break if heartbeats alone kept a run waiting for ever."""
    started_s = time.monotonic()
    with pytest.raises(TeacherUnavailable, match=r"alive .* 4 sequences.* 8 more") as caught:
        run(ignore, n_in_flight=4, request_timeout_s=0.2, outage_budget_s=0.7)
    assert time.monotonic() - started_s < 4
    assert "tcp://127.0.0.1:" in str(caught.value)


@pytest.mark.parametrize("code", ["busy", "draining"])
def test_a_server_that_only_says_busy_is_given_up_with_its_words(code: str) -> None:
    """Would break if retries counted as progress, or if nobody could see why nothing moved."""
    with pytest.raises(TeacherUnavailable, match=f"alive .*{code}: scripted"):
        run(lambda request, tokens, n: [error(request, code, 0.1)], request_timeout_s=0.2, outage_budget_s=0.3)


def test_a_silent_server_is_given_up_and_the_client_lives_on() -> None:
    """Would break if one outage left the client, or those who wait for it, stuck."""
    with ScriptedServer(ignore) as server, client(server, outage_budget_s=0.4, request_timeout_s=30.0) as teacher:
        server.answers_pings = False
        futures = [teacher.submit(rollout) for rollout in random_rollouts(3, N_VOCAB)]
        for future in futures:
            with pytest.raises(TeacherUnavailable, match=r"no message .* 3 sequences"):
                future.result(timeout=5)
        server.answers_pings, server.script = True, answer
        assert len(dict(teacher.score(random_rollouts(3, N_VOCAB)))) == 3


def test_nobody_waits_nothing_is_pinged_and_no_time_counts() -> None:
    """Would break if a trainer busy with a long step, or a paused process, took its own silence for an outage."""
    with ScriptedServer(answer) as server, client(server, outage_budget_s=0.4, request_timeout_s=5.0) as teacher:
        for _ in range(2):
            assert teacher.submit(random_rollouts(1, N_VOCAB)[0]).result(timeout=5)
            time.sleep(0.8)
        assert teacher.stats.n_resent == 0


def test_a_slow_consumer_is_not_an_outage() -> None:
    """Would break if the time the trainer spends between two results counted against the server."""
    with (
        ScriptedServer(answer) as server,
        client(server, n_in_flight=1, outage_budget_s=0.4, request_timeout_s=5.0) as teacher,
    ):
        for _ in teacher.score(random_rollouts(3, N_VOCAB)):
            time.sleep(0.5)
        assert teacher.stats.n_resent == 0


def test_a_restart_is_seen_by_its_epoch() -> None:
    """Would break if a server that has forgotten everything were waited for until request_timeout_s."""
    with ScriptedServer(ignore) as server, client(server, request_timeout_s=60.0) as teacher:
        future = teacher.submit(random_rollouts(1, N_VOCAB)[0])
        wait_until(lambda: server.of(ScoreRequest), 5.0, "the request")
        time.sleep(0.2)  # a pong has shown the first epoch
        server.script = answer
        server.epoch = os.urandom(16)  # behind the same connection, as behind a proxy
        assert future.result(timeout=5)
        assert teacher.stats.n_server_restarts == 1 and teacher.stats.n_resent == 1
        assert len({request.request_id for request in server.of(ScoreRequest)}) == 1


@pytest.mark.parametrize("restarts", [False, True])
def test_what_a_broken_connection_swallowed_is_sent_again_at_once(restarts: bool) -> None:
    """Would break if every network hiccup cost request_timeout_s, or resends looked like new work."""
    with ScriptedServer(ignore) as server, client(server, request_timeout_s=60.0) as teacher:
        futures = [teacher.submit(rollout) for rollout in random_rollouts(5, N_VOCAB)]
        wait_until(lambda: len(server.of(ScoreRequest)) == 5, 5.0, "the requests")
        time.sleep(0.2)
        server.script = answer
        started_s = time.monotonic()
        server.reconnect(epoch=os.urandom(16) if restarts else b"")
        for future in futures:
            assert future.result(timeout=10)
        assert time.monotonic() - started_s < 3
        assert teacher.stats.n_resent == 5 and teacher.stats.n_server_restarts == restarts
        assert len({request.request_id for request in server.of(ScoreRequest)}) == 5
        assert len(server.identities) == 1


def test_a_silence_that_ends_is_doubted() -> None:
    """Would break if what a partition swallowed, without a broken connection, waited for request_timeout_s."""
    with ScriptedServer(ignore) as server, client(server, request_timeout_s=60.0) as teacher:
        future = teacher.submit(random_rollouts(1, N_VOCAB)[0])
        wait_until(lambda: server.of(ScoreRequest), 5.0, "the request")
        server.answers_pings = False
        time.sleep(1.6)
        server.answers_pings, server.script = True, answer
        assert future.result(timeout=3)


def test_a_stopped_process_does_not_blame_the_server() -> None:
    """Would break if a suspended machine or a debugger ended the run: the silence was the trainer's own."""
    with ScriptedServer(ignore) as server:
        code = (
            "from tests.service.harness import connect, random_rollouts\n"
            f"teacher = connect({server.port}, n_vocab={N_VOCAB}, outage_budget_s=0.8, request_timeout_s=0.2)\n"
            f"assert len(dict(teacher.score(random_rollouts(3, {N_VOCAB})))) == 3\n"
            "teacher.close()\n"
        )
        process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, cwd=ROOT)
        try:
            wait_until(lambda: len(server.of(ScoreRequest)) >= 3, 20.0, "the requests")
            process.send_signal(signal.SIGSTOP)
            time.sleep(1.6)
            server.script = answer
            process.send_signal(signal.SIGCONT)
            _, words = process.communicate(timeout=10)
        finally:
            process.kill()
            process.wait(timeout=5)
        assert process.returncode == 0, words


def test_an_oversize_frame_does_not_end_the_connection_for_good() -> None:
    """Would break if the client trusted ZMQ to connect again: after a protocol error it never does."""

    def script(request: ScoreRequest, tokens: np.ndarray, n: int) -> list[Message]:
        return [[b"x" * (5 << 20)]] if n == 0 else [honest(request, tokens)]

    order, stats = run(script, n=1, request_timeout_s=60.0)
    assert order == [0] and stats.n_resent == 1


# Keys


def test_a_client_with_its_key_is_served(tmp_path: Path) -> None:
    """Would break if teacher.keys did not encrypt, or with it the connection were not made again after a break."""
    make_keys(tmp_path, ["trainer"], [])
    bundle = str(tmp_path / "bundles" / "trainer")
    with ScriptedServer(answer, load_server_keys(tmp_path)) as server, client(server, keys=bundle) as teacher:
        assert len(dict(teacher.score(random_rollouts(3, N_VOCAB)))) == 3
        server.reconnect()
        assert len(dict(teacher.score(random_rollouts(3, N_VOCAB)))) == 3


def test_a_refused_key_is_named_and_forgiven(tmp_path: Path) -> None:
    """Would break if a wrong key looked like a server that is off, or if a key added later were never tried again."""
    make_keys(tmp_path, ["trainer"], [])
    allowed = tmp_path / "clients" / "trainer.key"
    text = allowed.read_text()
    allowed.unlink()
    options = {"keys": str(tmp_path / "bundles" / "trainer"), "outage_budget_s": 0.8}
    with ScriptedServer(answer, load_server_keys(tmp_path)) as server, client(server, **options) as teacher:
        with pytest.raises(TeacherUnavailable, match="Handshake failed: .*teacher.keys"):
            teacher.info()
        allowed.write_text(text)
        assert server._authenticator is not None and server._authenticator.maybe_reload()
        assert teacher.info().n_workers == 2


@pytest.mark.parametrize(
    "server_keys,client_keys,words",
    [
        ("a", "b", "differs from server.key in teacher.keys"),
        ("", "a", "server.key in teacher.keys, or the server uses no keys"),
        ("a", "", "requires a key .set teacher.keys., or another service"),
    ],
)
def test_keys_that_do_not_fit_are_named(tmp_path: Path, server_keys: str, client_keys: str, words: str) -> None:
    """Would break if the user had to guess why a server that runs does not answer."""
    for name in ("a", "b"):
        make_keys(tmp_path / name, ["trainer"], [])
    keys = load_server_keys(tmp_path / server_keys) if server_keys else None
    bundle = str(tmp_path / client_keys / "bundles" / "trainer") if client_keys else ""
    with (
        ScriptedServer(answer, keys) as server,
        client(server, keys=bundle, outage_budget_s=0.4) as teacher,
        pytest.raises(TeacherUnavailable, match=words),
    ):
        teacher.info()


def test_another_service_on_the_port_is_named() -> None:
    """Would break if a wrong port number looked like a server that is off."""
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
            pytest.raises(TeacherUnavailable, match="another service"),
        ):
            teacher.info()
        listener.shutdown(socket.SHUT_RDWR)
