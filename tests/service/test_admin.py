"""`status`, `drain`, metrics and logs of a running server, as the person who runs it uses them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from gkd.config.load import load_config
from gkd.errors import ConfigError
from gkd.preflight.teacher import ask_teacher
from tests.service.commands import asking, at, n_scored, run
from tests.service.engine_host import save_engine_model
from tests.service.harness import ServerProcess, command, is_alive, trivial_model, wait_until

pytestmark = pytest.mark.service


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Two teachers, each with one worker on a GPU of its own; JSON logs."""
    folder = tmp_path_factory.mktemp("two")
    config = folder / "teacher.yaml"
    config.write_text(f"""
engine: trivial
log_format: json
metrics_port: 0
teachers:
  math: {{model: {trivial_model(folder / "math")}, gpus: [4]}}
  code: {{model: {trivial_model(folder / "code", 2000)}, gpus: [GPU-5]}}
""")
    with ServerProcess(None, folder, options=("--config", str(config))) as running:
        yield running


def test_two_teachers_are_ready_and_told_apart(server: ServerProcess) -> None:
    """Would break if the ready file, on which scripts wait, said less than it promises, or mixed the teachers up."""
    prints = server.ready["fingerprints"]
    assert set(prints) == {"math", "code"} and prints["math"] != prints["code"] and "fingerprint" not in server.ready
    assert server.ready["metrics_port"] > 0 and server.ready["worker_port"] is None
    assert server.ready["pid"] == server.process.pid and len(server.worker_pids) == 2
    for teacher, answered in (("math", 3), ("code", 3), ("", 0), ("nobody", 0)):
        with asking(server.port, 3, teacher) as dealer:
            assert n_scored(dealer, 3) == answered, teacher


def test_status_shows_workers_and_their_gpus(server: ServerProcess) -> None:
    """Would break if one could not see which worker sits on which GPU, and what it has done."""
    text = run("status", *at(server)).stdout
    assert "serving" in text and "math" in text and "code" in text
    status = json.loads(run("status", *at(server), "--json").stdout)
    workers = {worker["teacher"]: worker for worker in status["workers"]}
    assert {name: [gpu["id"] for gpu in worker["gpus"]] for name, worker in workers.items()} == {
        "math": ["4"],
        "code": ["GPU-5"],
    }
    assert {worker["pid"] for worker in workers.values()} == set(server.worker_pids)
    assert all(0 <= worker["last_heard_s"] < 3 for worker in workers.values())


@pytest.mark.parametrize("ignored", [False, True], ids=["in front", "behind `&` of a script"])
def test_watch_goes_on_until_ctrl_c(server: ServerProcess, ignored: bool) -> None:
    """Would break if the live table stopped after one look, ended in a traceback, or never where SIGINT was ignored."""
    handler = signal.SIG_IGN if ignored else signal.SIG_DFL
    watching = subprocess.Popen(
        command("status", *at(server), "--watch", "0.1", "--json"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, handler),  # not what the tests themselves have inherited
    )
    try:
        assert watching.stdout is not None and watching.stderr is not None
        epochs = {json.loads(watching.stdout.readline())["epoch"] for _ in range(3)}
        watching.send_signal(signal.SIGINT)
        assert watching.wait(timeout=10) == 0 and len(epochs) == 1 and watching.stderr.read() == b""
    finally:
        watching.kill()
        watching.communicate()


def test_metrics_are_served(server: ServerProcess) -> None:
    """Would break if Prometheus got nothing, or nothing of what the broker did."""
    with asking(server.port, 2, "math") as dealer:
        assert n_scored(dealer, 2) == 2
    with urllib.request.urlopen(f"http://127.0.0.1:{server.ready['metrics_port']}/metrics", timeout=5) as answer:
        text = answer.read().decode()
    assert 'teacher_server_workers{state="ready",teacher="code"} 1.0' in text
    line = next(line for line in text.splitlines() if line.startswith("teacher_server_requests_answered_total{"))
    assert 'signal="topk"' in line and float(line.rpartition(" ")[2]) >= 2


def test_json_logs_of_all_processes(server: ServerProcess) -> None:
    """Would break if one process of the server wrote lines that a log pipeline cannot read."""
    lines = [json.loads(line) for line in server.log_text().splitlines()]
    assert {line["process"] for line in lines} == {"server", "w0.0", "w1.0"}
    assert all({"time", "level", "pid", "logger", "message"} <= line.keys() for line in lines)


def test_who_does_not_answer_is_told_apart(server: ServerProcess, tmp_path: Path) -> None:
    """Would break if a wrong port, a refused key and a hung server all looked like the same silence."""
    assert "nothing listens there" in run("status", "--server", "127.0.0.1:1", "--timeout", "0.3", code=2).stderr
    run("keygen", str(tmp_path / "keys"), "--client", "c")
    keys = ("--keys", str(tmp_path / "keys/bundles/c"))
    assert "does not let us in" in run("status", *at(server), *keys, "--timeout", "0.5", code=2).stderr
    server.process.send_signal(signal.SIGSTOP)
    try:
        assert "--timeout" in run("status", *at(server), "--timeout", "x", code=2).stderr
        silent = run("status", *at(server), "--timeout", "0.5", code=2).stderr
    finally:
        server.process.send_signal(signal.SIGCONT)
    assert "no answer" in silent and "nothing listens" not in silent
    assert "no worker 'w9.9'" in run("drain", *at(server), "--worker", "w9.9", code=2).stderr


def test_drain_one_worker_then_the_server(tmp_path: Path) -> None:
    """Would break if a drained worker lost what it held or was started again, or a drain dropped queued work."""
    model = trivial_model(tmp_path / "model")
    options = ("--engine", "trivial", "--worker-timeout-s", "60")
    with ServerProcess(model, tmp_path, n_workers=2, options=options) as server:
        run("drain", *at(server), "--worker", "w0.0", "--wait")
        status = json.loads(run("status", *at(server), "--json").stdout)
        assert [worker["name"] for worker in status["workers"]] == ["w1.0"]
        left, stays = server.worker_pids
        wait_until(lambda: not is_alive(left), 5.0, "the drained worker's end")
        os.kill(stays, signal.SIGSTOP)  # so that its work is unfinished
        with asking(server.port, 5) as dealer:
            wait_until(lambda: "5 requests left" in run("drain", *at(server)).stdout, 10.0, "five requests to be there")
            waiting = subprocess.Popen(command("drain", *at(server), "--wait"), stdout=subprocess.PIPE, text=True)
            with asking(server.port, 1) as late:
                assert n_scored(late, 1) == 0, "a draining server takes no new work"
            assert waiting.poll() is None and server.process.poll() is None
            os.kill(stays, signal.SIGCONT)
            assert n_scored(dealer, 5) == 5
        assert waiting.communicate(timeout=20)[0].splitlines()[-1] == "the server has left" and waiting.returncode == 0
        assert server.process.wait(timeout=10) == 0
        assert "error" not in server.log_text()


def test_sigusr1_drains(tmp_path: Path) -> None:
    """Would break if a service manager, which has only signals, could not end the server without losing work."""
    with ServerProcess(trivial_model(tmp_path / "m"), tmp_path, options=("--engine", "trivial")) as server:
        server.process.send_signal(signal.SIGUSR1)
        assert server.process.wait(timeout=15) == 0 and "drained" in server.log_text()


def test_drain_tells_of_a_server_that_died(tmp_path: Path) -> None:
    """Would break if a script took a crash for the end of a drain."""
    options = ("--engine", "trivial", "--worker-timeout-s", "60")
    with ServerProcess(trivial_model(tmp_path / "m"), tmp_path, options=options) as server:
        os.kill(server.worker_pids[0], signal.SIGSTOP)
        with asking(server.port, 2):
            wait_until(lambda: "2 requests left" in run("drain", *at(server)).stdout, 10.0, "two requests to be there")
            waiting = subprocess.Popen(
                command("drain", *at(server), "--wait"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
            assert waiting.stdout is not None and waiting.stdout.readline()
            server.process.kill()
            assert "2 requests left" in waiting.communicate(timeout=20)[1] and waiting.returncode == 1


def test_a_keyed_server_refuses_in_time(tmp_path: Path) -> None:
    """Would break if a person who forgot --keys sat before a command that never ends."""
    run("keygen", str(tmp_path / "keys"), "--client", "c")
    options = ("--engine", "trivial", "--keys", str(tmp_path / "keys"))
    with ServerProcess(trivial_model(tmp_path / "m"), tmp_path, options=options) as server:
        start_s = time.monotonic()
        # Long enough for two resends: the refused connection takes no message any more.
        assert "does not let us in. Fix: --keys" in run("status", *at(server), "--timeout", "2.5", code=2).stderr
        assert time.monotonic() - start_s < 8.0  # 2.5 s and the start of Python on a busy machine


def test_drain_does_not_take_silence_for_the_end(tmp_path: Path) -> None:
    """Would break if a script that waits for a drain went on while the server still held work."""
    options = ("--engine", "trivial", "--worker-timeout-s", "60")
    with ServerProcess(trivial_model(tmp_path / "m"), tmp_path, options=options) as server:
        os.kill(server.worker_pids[0], signal.SIGSTOP)
        with asking(server.port, 1):
            wait_until(lambda: "1 requests left" in run("drain", *at(server)).stdout, 10.0, "the request to be there")
            words = command("drain", *at(server), "--wait", "--timeout", "4")  # past the heartbeats of other sockets
            waiting = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            assert waiting.stdout is not None and waiting.stdout.readline()
            server.process.send_signal(signal.SIGSTOP)
            try:
                told = waiting.communicate(timeout=20)[1]
            finally:
                server.process.send_signal(signal.SIGCONT)
            assert waiting.returncode == 2 and "1 requests were left" in told and "connected and silent" in told


def test_the_trainer_names_a_wrong_teacher(server: ServerProcess) -> None:
    """Would break if a misspelt teacher.name reached the user as a refused request."""
    config = load_config(None, [f"teacher.server_port={server.port}", "teacher.name=nobody"])
    with pytest.raises(ConfigError, match="bad_request") as caught:
        ask_teacher(config)
    assert caught.value.key == "teacher.name"


def test_a_teacher_without_a_plain_lm_head_is_refused_before_the_start(tmp_path: Path) -> None:
    """Would break if signal `hidden` failed only after both pools are up, as a teacher's error without a key."""
    model = save_engine_model(tmp_path / "phi", kind="Phi", num_key_value_heads=2)
    file = model / "model.safetensors"
    weights = load_file(file)
    weights["lm_head.bias"] = torch.ones(len(weights["lm_head.bias"]))
    save_file(weights, file, {"format": "pt"})
    with ServerProcess(model, tmp_path) as server:
        base = [f"teacher.server_port={server.port}"]
        assert ask_teacher(load_config(None, base)).vocab_size > 0
        with pytest.raises(ConfigError, match="more than a matrix") as caught:
            ask_teacher(load_config(None, [*base, "teacher.signal=hidden"]))
    assert caught.value.key == "teacher.signal"
