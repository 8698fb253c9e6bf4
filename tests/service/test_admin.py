"""`status`, `drain`, metrics and logs of a running server, through the command line."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from gkd.config.load import load_config
from gkd.errors import ConfigError, TeacherRefusal
from gkd.preflight.teacher import request_info
from teacher_server.__main__ import main
from teacher_server.cli.serve import status_command
from tests.processes import is_alive, wait_until
from tests.refusals import refuses
from tests.service.commands import address, n_scored, run, sent_requests, wait_for_requests, workers
from tests.service.engine_host import save_biased_model
from tests.service.harness import PATIENT, TRIVIAL, ServerProcess, command, connect, trivial_model

pytestmark = pytest.mark.service


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Two teachers, each with one worker on a GPU of its own; JSON logs."""
    folder = tmp_path_factory.mktemp("two")
    config = folder / "teacher.yaml"
    config.write_text(f"""
engine: {TRIVIAL[1]}
log_format: json
metrics_port: 0
max_batch_tokens: 32768
teachers:
  math: {{model: {trivial_model(folder / "math")}, gpus: [4]}}
  code: {{model: {trivial_model(folder / "code", 2000)}, gpus: [GPU-5]}}
""")
    with ServerProcess(None, folder, options=("--config", str(config))) as running:
        yield running


def test_the_ready_file_and_requests_distinguish_two_teachers(server: ServerProcess) -> None:
    """Fails if the ready file lacks a field that scripts rely on, or a request reaches the wrong teacher."""
    fingerprints = server.ready["fingerprints"]
    assert set(fingerprints) == {"math", "code"} and fingerprints["math"] != fingerprints["code"]
    assert "fingerprint" not in server.ready
    assert server.ready["metrics_port"] > 0 and server.ready["worker_port"] is None
    assert server.ready["pid"] == server.process.pid and len(server.worker_pids) == 2
    for teacher, expected in (("math", 3), ("code", 3), ("", 0), ("unknown", 0)):
        with sent_requests(server.port, 3, teacher) as dealer:
            assert n_scored(dealer, 3) == expected, teacher


def test_status_shows_workers_and_their_gpus(server: ServerProcess) -> None:
    """Fails if the status omits a worker, its GPU or its counters."""
    text = run("status", *address(server)).stdout
    assert "serving" in text and "math" in text and "code" in text
    status = json.loads(run("status", *address(server), "--json").stdout)
    found = {worker["teacher"]: worker for worker in status["workers"]}
    assert {name: [gpu["id"] for gpu in worker["gpus"]] for name, worker in found.items()} == {
        "math": ["4"],
        "code": ["GPU-5"],
    }
    assert {worker["pid"] for worker in found.values()} == set(server.worker_pids)
    assert all(0 <= worker["last_heard_s"] < 3 for worker in found.values())


@pytest.mark.parametrize("ignored", [False, True], ids=["foreground", "background of a script"])
def test_watch_repeats_until_ctrl_c(server: ServerProcess, *, ignored: bool) -> None:
    """Fails if --watch stops after one table, prints a traceback, or ignores Ctrl-C where SIGINT was ignored."""
    handler = signal.SIG_IGN if ignored else signal.SIG_DFL
    watching = subprocess.Popen(
        command("status", *address(server), "--watch", "0.1", "--json"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, handler),
    )
    try:
        epochs = {json.loads(watching.stdout.readline())["epoch"] for _ in range(3)}
        watching.send_signal(signal.SIGINT)
        assert watching.wait(timeout=30) == 0 and len(epochs) == 1 and watching.stderr.read() == b""
    finally:
        watching.kill()
        watching.communicate()


def test_port_is_short_for_the_server_address(server: ServerProcess, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if `status --port P` or `--host H` does not reach the server, or contradicting flags are accepted."""
    for words in (
        ("--port", str(server.port)),
        ("--host", "localhost", "--port", str(server.port)),
        ("--server", f"tcp://127.0.0.1:{server.port}"),
    ):
        assert main(["status", *words, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["teachers"]
    for words, token in (
        ((*address(server), "--port", "1"), "--server"),
        (("--port", "http"), "--host/--port 127.0.0.1:http"),
        (("--host", "no-such-host.invalid"), "no-such-host.invalid:15555: unknown host"),
    ):
        assert main(["status", *words]) == 2
        assert token in capsys.readouterr().err


def test_a_misspelled_command_names_the_right_one(capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if an unknown command is read as the serve command, whose usage text does not help."""
    assert main(["stauts"]) == 2
    error = capsys.readouterr().err
    assert "'stauts'" in error and "status?" in error and len(error.splitlines()) == 1
    assert main(["start"]) == 2  # no such command: the list of all helps more than the nearest name
    assert "serve, worker" in capsys.readouterr().err


def test_a_refused_connection_is_reported_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if `status` waits for its time-out although no process listens on the port."""
    start_s = time.monotonic()
    assert main(["status", "--server", "127.0.0.1:1", "--timeout", "60"]) == 2
    assert time.monotonic() - start_s < 50 and "127.0.0.1:1:" in capsys.readouterr().err


def test_metrics_are_served(server: ServerProcess) -> None:
    """Fails if the metrics page lacks the broker's counters."""
    with sent_requests(server.port, 2, "math") as dealer:
        assert n_scored(dealer, 2) == 2
    with urllib.request.urlopen(f"http://127.0.0.1:{server.ready['metrics_port']}/metrics", timeout=5) as response:
        text = response.read().decode()
    assert 'teacher_server_workers{state="ready",teacher="code"} 1.0' in text
    line = next(line for line in text.splitlines() if line.startswith("teacher_server_requests_answered_total{"))
    assert 'signal="topk"' in line and float(line.rpartition(" ")[2]) >= 2


def test_json_logs_of_all_processes(server: ServerProcess) -> None:
    """Fails if a process of the server writes a log line that is not JSON."""
    lines = [json.loads(line) for line in server.log_text().splitlines()]
    assert {line["process"] for line in lines} == {"server", "w0.0", "w1.0"}
    assert all({"time", "level", "pid", "logger", "message"} <= line.keys() for line in lines)


def test_errors_distinguish_a_refused_key_from_a_hung_server(server: ServerProcess, tmp_path: Path) -> None:
    """Fails if a refused key and a hung server give the same error."""
    run("keygen", str(tmp_path / "keys"), "--client", "c")
    keys = ("--keys", str(tmp_path / "keys/bundles/c"))
    refused = run("status", *address(server), *keys, "--timeout", "0.5", code=2).stderr
    assert "server.key" in refused
    server.process.send_signal(signal.SIGSTOP)
    try:
        assert "--timeout" in run("status", *address(server), "--timeout", "x", code=2).stderr
        silent = run("status", *address(server), "--timeout", "0.5", code=2).stderr
    finally:
        server.process.send_signal(signal.SIGCONT)
    assert "0.5 s" in silent and "server.key" not in silent
    assert "'w9.9'" in run("drain", *address(server), "--worker", "w9.9", code=2).stderr


def test_drain_one_worker_then_the_server(tmp_path: Path) -> None:
    """Fails if a drained worker loses requests or is restarted, or if a drain drops queued requests."""
    model = trivial_model(tmp_path / "model")
    with ServerProcess(model, tmp_path, n_workers=2, options=PATIENT) as server:
        run("drain", *address(server), "--worker", "w0.0", "--wait")
        assert workers(server) == {"w1.0"}
        drained, running = server.worker_pids
        wait_until(lambda: not is_alive(drained), 30.0, "exit of the drained worker")
        os.kill(running, signal.SIGSTOP)  # keeps its requests unfinished
        with sent_requests(server.port, 5) as dealer:
            wait_for_requests(server, 5)
            assert "5 requests" in run("drain", *address(server)).stdout
            waiting = subprocess.Popen(command("drain", *address(server), "--wait"), stdout=subprocess.PIPE, text=True)
            assert waiting.stdout is not None and "5 requests" in waiting.stdout.readline()
            with sent_requests(server.port, 1) as late:
                assert n_scored(late, 1) == 0, "a draining server must refuse new requests"
            assert waiting.poll() is None and server.process.poll() is None
            os.kill(running, signal.SIGCONT)
            assert n_scored(dealer, 5) == 5
        output = waiting.communicate(timeout=30)[0]
        assert waiting.returncode == 0 and "0 requests" in output.splitlines()[-2]
        assert server.process.wait(timeout=30) == 0
        assert "error" not in server.log_text()


def test_a_worker_that_crashes_while_it_is_drained(tmp_path: Path) -> None:
    """Fails if the copy that was to leave its GPU is started again there, or its loss is reported as its exit."""
    with ServerProcess(trivial_model(tmp_path / "model"), tmp_path, n_workers=2, options=PATIENT) as server:
        for pid in server.worker_pids:
            os.kill(pid, signal.SIGSTOP)  # keeps its requests unfinished
        with sent_requests(server.port, 6) as dealer:
            drain = ("drain", *address(server), "--worker", "w0.0")
            wait_for_requests(server, 6)
            waiting = subprocess.Popen(command(*drain, "--wait"), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            assert waiting.stdout is not None and b"3 requests" in waiting.stdout.readline()
            os.kill(server.worker_pids[0], signal.SIGKILL)
            os.kill(server.worker_pids[1], signal.SIGCONT)
            assert n_scored(dealer, 6) == 6
        output, error = waiting.communicate(timeout=30)
        assert waiting.returncode == 1 and b"w0.0" in error and not output
        wait_until(lambda: "has left" in server.log_text(), 30.0, "the supervisor's notice")
        assert workers(server) == {"w1.0"}


def test_sigusr1_drains(tmp_path: Path) -> None:
    """Fails if a service manager, which can only send signals, cannot end the server without losing requests."""
    with ServerProcess(trivial_model(tmp_path / "m"), tmp_path, options=TRIVIAL) as server:
        server.process.send_signal(signal.SIGUSR1)
        assert server.process.wait(timeout=30) == 0 and "drained" in server.log_text()


def test_large_batches_ask_for_more_sequences(server: ServerProcess) -> None:
    """Fails if a client that follows the server's number leaves batches of short sequences half empty."""
    with connect(server.port, name="math") as client:
        assert client.info().n_streams * 256 >= 2 * 32768


def test_drain_does_not_report_a_silent_or_dead_server_as_drained(tmp_path: Path) -> None:
    """Fails if `drain --wait` reports a crash as a finished drain, or returns 0 while the server still has requests."""
    with ServerProcess(trivial_model(tmp_path / "m"), tmp_path, options=PATIENT) as server:
        os.kill(server.worker_pids[0], signal.SIGSTOP)
        with sent_requests(server.port, 2):
            wait_for_requests(server, 2)
            # The time-out is longer than the interval of other sockets' heartbeats.
            for number, code, named in ((signal.SIGSTOP, 2, "4 s"), (signal.SIGKILL, 1, "2 requests")):
                words = command("drain", *address(server), "--wait", "--timeout", "4")
                waiting = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
                assert waiting.stdout is not None and waiting.stdout.readline()
                server.process.send_signal(number)
                try:
                    error = waiting.communicate(timeout=30)[1]
                finally:
                    server.process.send_signal(signal.SIGCONT)
                assert waiting.returncode == code and "2 requests" in error and named in error


def test_a_keyed_server_refuses_a_client_without_keys_and_prints_the_right_command(tmp_path: Path) -> None:
    """Fails if `status` without --keys hangs, or if the command that the server prints does not work."""
    run("keygen", str(tmp_path / "keys"), "--client", "c")
    options = (*TRIVIAL, "--keys", str(tmp_path / "keys"))
    with ServerProcess(trivial_model(tmp_path / "m"), tmp_path, options=options) as server:
        start_s = time.monotonic()
        # Long enough for two resends: after a refused handshake the socket has no pipe to send to.
        assert "--keys" in run("status", *address(server), "--timeout", "2.5", code=2).stderr
        assert time.monotonic() - start_s < 60
        ready, line = (server.process.stdout.readline().decode() for _ in range(2))
        words = shlex.split(line.removeprefix("status: "))
        assert ready.startswith("ready: ") and words[1:3] == ["teacher", "status"]
        assert words[-2:] == ["--keys", str(tmp_path / "keys/bundles/c")]
        assert json.loads(run(*words[2:], "--json").stdout)["workers"]


def test_the_status_command_replaces_the_wildcard_address_and_a_missing_bundle(tmp_path: Path) -> None:
    """Fails if the printed command connects to 0.0.0.0, or names a bundle that was copied to its host and deleted."""
    words = shlex.split(status_command("0.0.0.0", 15777, str(tmp_path)))
    assert words[1:] == ["teacher", "status", "--server", "127.0.0.1:15777", "--keys", str(tmp_path / "bundles/NAME")]
    assert "--keys" not in status_command("10.0.0.5", 15777, None)


def test_the_trainer_reports_a_wrong_teacher_name(server: ServerProcess) -> None:
    """Fails if a misspelled teacher.name is reported as a refused request, without the key."""
    config = load_config(None, [f"teacher.server_port={server.port}", "teacher.name=unknown"])
    with refuses("teacher.name"):
        request_info(*config.derived.routes)


def test_a_teacher_without_a_plain_lm_head_is_refused_before_the_start(tmp_path: Path) -> None:
    """Fails if signal `hidden` fails only after both pools have started, with an error that lacks the key."""
    with ServerProcess(save_biased_model(tmp_path / "phi"), tmp_path) as server:
        base = [f"teacher.server_port={server.port}"]
        assert request_info(*load_config(None, base).derived.routes).vocab_size > 0
        with pytest.raises(ConfigError) as caught:
            request_info(*load_config(None, [*base, "teacher.signal=hidden"]).derived.routes)
    cause = caught.value.__cause__
    assert caught.value.key == "teacher.signal" and isinstance(cause, TeacherRefusal) and cause.code == "bad_request"
