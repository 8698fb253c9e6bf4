"""Workers that join and leave a running server: other hosts, keys, signals, and restarts by the supervisor."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq

from teacher_server.broker.broker import Broker
from teacher_server.broker.worker_registry import WorkerEvent
from teacher_server.cli.supervisor import Supervisor, WorkerCommand
from teacher_server.errors import ServerError
from teacher_server.worker.gpus import FoundGpus, WorkerPlan, plan_workers
from tests.processes import FOREVER, is_alive, wait_until
from tests.service.commands import address, n_scored, run, sent_requests, workers
from tests.service.harness import TRIVIAL, ServerProcess, command, trivial_model
from tests.unit.test_server_settings import settings_of

pytestmark = pytest.mark.service
Join = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return trivial_model(tmp_path / "model")


@pytest.fixture
def join(model: Path) -> Iterator[Join]:
    """Start `worker` processes as on another host. They are killed after the test."""
    started: list[subprocess.Popen[str]] = []

    def start(port: int, *words: str, folder: Path = model) -> subprocess.Popen[str]:
        words = ("worker", "--broker", f"127.0.0.1:{port}", "--model", str(folder), *TRIVIAL, *words)
        started.append(subprocess.Popen(command(*words), stderr=subprocess.PIPE, text=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate(timeout=30)


def log_of(process: subprocess.Popen[str]) -> str:
    """Wait for a worker's exit, and return its log."""
    return process.communicate(timeout=30)[1]


def test_all_workers_join_from_other_hosts(tmp_path: Path, join: Join) -> None:
    """Fails if a server without local workers is ready before a worker has joined, or never."""
    ready = tmp_path / "ready.json"
    flags = ("--teacher", "math", "--n-workers", "0", "--port", "0", "--worker-port", "0", "--ready-file", str(ready))
    with (tmp_path / "log").open("wb") as log:
        server = subprocess.Popen(command(*flags), stdout=subprocess.PIPE, stderr=log)
    try:
        text = lambda: (tmp_path / "log").read_text()  # noqa: E731
        wait_until(lambda: "--broker 127.0.0.1:" in text(), 20.0, "the worker port")
        port = int(text().partition("--broker 127.0.0.1:")[2].split()[0])
        assert not ready.exists()
        worker = join(port, "--teacher", "math")
        wait_until(ready.exists, 20.0, "readiness")
        content = json.loads(ready.read_text())
        assert content["worker_pids"] == [] and content["worker_port"] == port
        assert set(content["fingerprints"]) == {"math"}
        with sent_requests(content["port"], 3) as dealer:
            assert n_scored(dealer, 3) == 3
        assert worker.poll() is None
    finally:
        server.terminate()
        server.communicate(timeout=30)
    assert server.returncode == 0 and not ready.exists()


def test_a_worker_joins_and_leaves_a_running_server(tmp_path: Path, model: Path, join: Join) -> None:
    """Fails if a worker cannot join a running server, loses requests on SIGTERM, or serves another model."""
    options = (*TRIVIAL, "--worker-port", "0")
    with ServerProcess(model, tmp_path, options=options) as server:
        joined = join(server.ready["worker_port"], "--name", "remote")
        wait_until(lambda: workers(server) == {"w0.0", "remote"}, 20.0, "the remote worker")
        joined.send_signal(signal.SIGTERM)
        assert "dismissed" in log_of(joined) and joined.returncode == 0
        assert workers(server) == {"w0.0"}
        other = join(server.ready["worker_port"], folder=trivial_model(tmp_path / "other", 2000))
        assert "model_fingerprint" in log_of(other) and other.returncode == 1
        with sent_requests(server.port, 3) as dealer:
            assert n_scored(dealer, 3) == 3


def test_a_second_signal_ends_a_worker_at_once(model: Path, join: Join) -> None:
    """Fails if only SIGKILL ends a worker whose broker does not dismiss it."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as silent:
        worker = join(silent.bind_to_random_port("tcp://127.0.0.1"), "--name", "waiting")
        missing = {"loaded", "connected"}
        while missing:
            line = worker.stderr.readline()
            assert line, "the worker has exited"
            missing -= {word for word in missing if word in line}
        worker.send_signal(signal.SIGINT)
        assert "signal:" in worker.stderr.readline() and worker.poll() is None
        worker.send_signal(signal.SIGINT)
        assert "second signal:" in log_of(worker) and worker.returncode == 1


def test_keys_for_clients_and_workers(tmp_path: Path, model: Path, join: Join) -> None:
    """Fails if a server accepts a client or worker without a key, or refuses one with the right key."""
    keys = tmp_path / "keys"
    run("keygen", str(keys), "--client", "c", "--worker", "w")
    bundle = ("--keys", str(keys / "bundles/c"))
    options = (*TRIVIAL, "--host", "0.0.0.0", "--worker-port", "0", "--keys", str(keys))
    with ServerProcess(model, tmp_path, options=options) as server:
        assert workers(server, *bundle) == {"w0.0"}
        listed = join(server.ready["worker_port"], "--name", "listed", "--keys", str(keys / "bundles/w"))
        wait_until(lambda: "listed" in workers(server, *bundle), 20.0, "the worker with a key")
        keyless = join(server.ready["worker_port"], "--name", "keyless")
        assert "--keys" in run("status", *address(server), "--timeout", "1", code=2).stderr
        assert workers(server, *bundle) == {"w0.0", "listed"}
        (keys / "workers/w.key").unlink()  # revoked: open connections stay, new ones are refused
        wait_until(lambda: "worker w is no longer allowed" in server.log_text(), 30.0, "reload of the allow-list")
        late = join(server.ready["worker_port"], "--keys", str(keys / "bundles/w"))
        assert f"127.0.0.1:{server.ready['worker_port']}" in log_of(late) and late.returncode == 1
        assert listed.poll() is None and keyless.poll() is None
        assert "listed" in workers(server, *bundle) and "keyless" not in workers(server, *bundle)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_worker_is_replaced(tmp_path: Path, model: Path, number: signal.Signals) -> None:
    """Fails if the server continues with one copy less, or starts the new worker on another GPU."""
    with ServerProcess(model, tmp_path, n_workers=2, options=(*TRIVIAL, "--gpus", "4,5")) as server:
        os.kill(server.worker_pids[1], number)
        wait_until(lambda: workers(server) == {"w0.0", "w1.1"}, 20.0, "another worker")
        status = json.loads(run("status", *address(server), "--json").stdout)
        gpus = {worker["name"]: worker["gpus"][0]["id"] for worker in status["workers"]}
        assert gpus == {"w0.0": "4", "w1.1": "5"}
        pid = next(worker["pid"] for worker in status["workers"] if worker["name"] == "w1.1")
    wait_until(lambda: not is_alive(pid), 30.0, "exit of the new worker")


class FailsOnExit(WorkerCommand):
    """Start processes that never join and exit with code 1 on SIGUSR1, except the one of slot `stubborn`."""

    def argv(self, plan: WorkerPlan, name: str) -> list[str]:
        handler = "signal.SIG_IGN" if plan.gpus == ("stubborn",) else "lambda *_: sys.exit(1)"
        code = f"import signal, sys; signal.signal(signal.SIGUSR1, {handler}); print('up', flush=True); {FOREVER}"
        return [sys.executable, "-c", code]


@contextmanager
def supervised(
    folder: Path, gpus: str, workers: type[WorkerCommand] = FailsOnExit, endpoint: str = ""
) -> Iterator[tuple[Broker, Supervisor]]:
    """Start a supervisor with one slot per entry of `gpus`. Its broker gets events from the test only."""
    plans = plan_workers(settings_of("--model", "m", "--device", "cpu", "--gpus", gpus), FoundGpus((), "", {}))
    broker = Broker("127.0.0.1", 0, f"ipc://{folder}/workers")
    broker.start()
    supervisor = Supervisor(workers(endpoint, 1.0, "text"), plans, broker)
    try:
        yield broker, supervisor
    finally:
        supervisor.stop()
        broker.stop()


def test_a_slot_that_is_repeatedly_excluded_ends_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if workers on a faulty GPU are restarted forever, or one bad reply in a long time ends the server."""
    monkeypatch.setattr("teacher_server.cli.supervisor._EXCLUDED_EXIT_S", 0.05)

    def exclude(name: str) -> None:
        broker.events.put(WorkerEvent("ready", name, ""))
        supervisor.check()
        pid = supervisor.pids[0]
        broker.events.put(WorkerEvent("excluded", name, "a NaN in logprobs"))
        supervisor.check()

        def has_exited() -> bool:
            supervisor.check()  # the process does not exit by itself
            return not is_alive(pid)

        wait_until(has_exited, 30.0, "exit of the excluded worker")
        supervisor.check()

    with supervised(tmp_path, "7") as (broker, supervisor):
        exclude("w0.0")
        for good_time_s, name in ((0.0, "w0.1"), (600.0, "w0.2")):  # after a good time the count starts again
            monkeypatch.setattr("teacher_server.cli.supervisor._GOOD_TIME_S", good_time_s)
            exclude(name)
        with pytest.raises(ServerError, match="GPU 7.* 3 times.* a NaN in logprobs"):
            exclude("w0.3")


class WritesItsPath(WorkerCommand):
    """Start processes that write their PYTHONPATH to the file that takes the place of the broker's endpoint."""

    def argv(self, plan: WorkerPlan, name: str) -> list[str]:
        code = f"import os; open({self.endpoint!r}, 'w').write(os.environ['PYTHONPATH'] + '\\n'); {FOREVER}"
        return [sys.executable, "-c", code]


def test_a_worker_finds_the_package_wherever_the_server_was_started(tmp_path: Path) -> None:
    """Fails if workers of a server that is not installed cannot start, or import its modules as `log` or `wire`."""
    file = tmp_path / "path"
    with supervised(tmp_path, "a", WritesItsPath, str(file)):
        wait_until(lambda: file.exists() and file.read_text().endswith("\n"), 20.0, "the worker's path")
    first = Path(file.read_text().rstrip().split(os.pathsep)[0])
    assert (first / "teacher_server" / "__main__.py").is_file()


def test_a_dismissed_worker_is_not_replaced_after_any_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Fails if a drained worker is restarted because its engine exited with an error, or if it can hang forever."""
    monkeypatch.setattr("teacher_server.cli.supervisor._DISMISSED_EXIT_S", 0.2)
    with supervised(tmp_path, "a,stubborn") as (broker, supervisor):
        pids, printed = supervisor.pids, list[str]()  # what a worker prints goes to stderr
        wait_until(lambda: printed.append(capfd.readouterr().err) or "".join(printed).count("up") == 2, 20.0, "workers")
        for name in ("w0.0", "w1.0"):
            broker.events.put(WorkerEvent("ready", name, ""))
            broker.events.put(WorkerEvent("dismissed", name, ""))
        supervisor.check()
        for pid in pids:
            os.kill(pid, signal.SIGUSR1)

        def all_left() -> bool:
            supervisor.check()
            return not supervisor.pids

        wait_until(all_left, 30.0, "exit of both workers")
        assert not any(is_alive(pid) for pid in pids) and not supervisor.n_loading


def test_a_worker_lost_while_others_load_is_restarted(tmp_path: Path) -> None:
    """Fails if a crash of one worker while another one loads ends the server."""
    with supervised(tmp_path, "a,b") as (broker, supervisor):
        first, loading = supervisor.pids
        broker.events.put(WorkerEvent("ready", "w0.0", ""))
        supervisor.check()
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: not is_alive(first), 30.0, "exit of the worker")
        supervisor.check()
        assert supervisor.pids[0] != first and supervisor.pids[1] == loading and supervisor.n_loading
        os.kill(loading, signal.SIGKILL)  # this worker was never ready
        wait_until(lambda: not is_alive(loading), 30.0, "exit of the other worker")
        with pytest.raises(ServerError, match=r"w1\.0.* code -9"):
            supervisor.check()
