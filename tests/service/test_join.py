"""Workers that come and go: from other hosts, with keys, by signals, and under the supervisor's eyes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from teacher_server.broker.broker import Broker
from teacher_server.broker.worker_registry import WorkerEvent
from teacher_server.cli.supervisor import Supervisor, WorkerCommand
from teacher_server.errors import ServerError
from teacher_server.worker.gpus import FoundGpus, WorkerPlan, plan_workers
from tests.service.commands import asking, at, n_scored, run
from tests.service.harness import ServerProcess, command, is_alive, trivial_model, wait_until
from tests.unit.test_server_settings import settings_of

pytestmark = pytest.mark.service
Join = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return trivial_model(tmp_path / "model")


@pytest.fixture
def join(model: Path) -> Iterator[Join]:
    """Starts `worker` processes as a user on another host would; none outlives the test."""
    started: list[subprocess.Popen[str]] = []

    def start(port: int, *words: str, folder: Path = model) -> subprocess.Popen[str]:
        words = ("worker", "--broker", f"127.0.0.1:{port}", "--model", str(folder), "--engine", "trivial", *words)
        started.append(subprocess.Popen(command(*words), stderr=subprocess.PIPE, text=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate(timeout=5)


def workers(server: ServerProcess, *words: str) -> set[str]:
    status = json.loads(run("status", *at(server), *words, "--json").stdout)
    return {worker["name"] for worker in status["workers"]}


def words_of(process: subprocess.Popen[str]) -> str:
    """What a worker wrote until it ended."""
    return process.communicate(timeout=20)[1]


def test_all_workers_join_from_elsewhere(tmp_path: Path, join: Join) -> None:
    """Would break if a broker without workers of its own were ready too early, or never."""
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
        told = json.loads(ready.read_text())
        assert told["worker_pids"] == [] and told["worker_port"] == port and set(told["fingerprints"]) == {"math"}
        with asking(told["port"], 3) as dealer:
            assert n_scored(dealer, 3) == 3
        assert worker.poll() is None
    finally:
        server.terminate()
        server.communicate(timeout=10)
    assert server.returncode == 0 and not ready.exists()


def test_join_and_leave_at_any_time(tmp_path: Path, model: Path, join: Join) -> None:
    """Would break if a worker that was told to end took requests with it, or one could not join a running server."""
    options = ("--engine", "trivial", "--worker-port", "0")
    with ServerProcess(model, tmp_path, options=options) as server:
        guest = join(server.ready["worker_port"], "--name", "guest")
        wait_until(lambda: workers(server) == {"w0.0", "guest"}, 20.0, "the guest")
        guest.send_signal(signal.SIGTERM)
        assert "leaving when what is here is finished" in words_of(guest) and guest.returncode == 0
        assert workers(server) == {"w0.0"}
        other = join(server.ready["worker_port"], folder=trivial_model(tmp_path / "other", 2000))
        assert "is not the" in words_of(other) and other.returncode == 1
        with asking(server.port, 3) as dealer:
            assert n_scored(dealer, 3) == 3


def test_a_second_signal_ends_a_worker_at_once(model: Path, join: Join) -> None:
    """Would break if a worker whose broker is gone could be ended by SIGKILL only."""
    lost = join(1, "--name", "lost")  # nobody listens there: it keeps trying
    assert lost.stderr is not None
    while "loaded" not in lost.stderr.readline():
        pass
    lost.send_signal(signal.SIGINT)
    assert "leaving" in lost.stderr.readline() and lost.poll() is None
    lost.send_signal(signal.SIGINT)
    assert "at once" in words_of(lost) and lost.returncode == 1


def test_keys_for_clients_and_workers(tmp_path: Path, model: Path, join: Join) -> None:
    """Would break if a real server let in who has no key, or kept out who has the right one."""
    keys = tmp_path / "keys"
    run("keygen", str(keys), "--client", "c", "--worker", "w")
    bundle = ("--keys", str(keys / "bundles/c"))
    options = ("--engine", "trivial", "--host", "0.0.0.0", "--worker-port", "0", "--keys", str(keys))
    with ServerProcess(model, tmp_path, options=options) as server:
        assert workers(server, *bundle) == {"w0.0"}
        guest = join(server.ready["worker_port"], "--name", "guest", "--keys", str(keys / "bundles/w"))
        wait_until(lambda: "guest" in workers(server, *bundle), 20.0, "the guest")
        stranger = join(server.ready["worker_port"], "--name", "stranger")
        assert "does not let us in" in run("status", *at(server), "--timeout", "1", code=2).stderr
        assert workers(server, *bundle) == {"w0.0", "guest"}
        (keys / "workers/w.key").unlink()  # taken back: who is in stays in, but it opens no new connection
        wait_until(lambda: "worker w is no longer allowed" in server.log_text(), 5.0, "the list to be read again")
        late = join(server.ready["worker_port"], "--keys", str(keys / "bundles/w"))
        assert "does not allow this worker's key" in words_of(late) and late.returncode == 1
        assert guest.poll() is None and stranger.poll() is None
        assert "guest" in workers(server, *bundle) and "stranger" not in workers(server, *bundle)


def test_a_killed_worker_is_replaced(tmp_path: Path, model: Path) -> None:
    """Would break if the server went on with one copy less, or gave the new one another GPU."""
    with ServerProcess(model, tmp_path, n_workers=2, options=("--engine", "trivial", "--gpus", "4,5")) as server:
        os.kill(server.worker_pids[1], signal.SIGKILL)
        wait_until(lambda: workers(server) == {"w0.0", "w1.1"}, 20.0, "another worker")
        status = json.loads(run("status", *at(server), "--json").stdout)
        gpus = {worker["name"]: worker["gpus"][0]["id"] for worker in status["workers"]}
        assert gpus == {"w0.0": "4", "w1.1": "5"}
        pid = next(worker["pid"] for worker in status["workers"] if worker["name"] == "w1.1")
    wait_until(lambda: not is_alive(pid), 5.0, "the new worker's end")


class SleepingWorkers(WorkerCommand):
    """Processes that never join, so that the test speaks for the broker about them."""

    def argv(self, plan: WorkerPlan, name: str) -> list[str]:
        return [sys.executable, "-c", "import time; time.sleep(60)"]


def test_a_slot_that_is_excluded_again_and_again_ends_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Would break if a bad card were tried for ever, or one bad answer in a long time ended the server."""
    monkeypatch.setattr("teacher_server.cli.supervisor._LAST_WORDS_S", 0.05)
    plans = plan_workers(settings_of("--model", "m", "--device", "cpu", "--gpus", "7"), FoundGpus((), "", {}))
    broker = Broker("127.0.0.1", 0, f"ipc://{tmp_path}/workers")
    broker.start()
    supervisor = Supervisor(SleepingWorkers("", 1.0, "text"), plans, broker)

    def exclude(name: str) -> None:
        broker.events.put(WorkerEvent("ready", name, ""))
        supervisor.check()
        pid = supervisor.pids[0]
        broker.events.put(WorkerEvent("excluded", name, "a NaN in logprobs"))
        supervisor.check()
        time.sleep(0.1)
        supervisor.check()  # it did not end by itself
        wait_until(lambda: not is_alive(pid), 5.0, "the excluded worker's end")
        supervisor.check()

    try:
        exclude("w0.0")
        monkeypatch.setattr("teacher_server.cli.supervisor._GOOD_TIME_S", 0.0)
        exclude("w0.1")  # after a good time: the first again
        monkeypatch.setattr("teacher_server.cli.supervisor._GOOD_TIME_S", 600.0)
        exclude("w0.2")
        with pytest.raises(ServerError, match="GPU 7.*3 times in a row, now because a NaN in logprobs"):
            exclude("w0.3")
    finally:
        supervisor.stop()
        broker.stop()


class PoorEnd(WorkerCommand):
    """Processes that never join and end with code 1 when they are told to, except those of slot `stubborn`."""

    def argv(self, plan: WorkerPlan, name: str) -> list[str]:
        end = "signal.SIG_IGN" if plan.gpus == ("stubborn",) else "lambda *_: sys.exit(1)"
        code = (
            f"import signal, sys, time; signal.signal(signal.SIGUSR1, {end}); print('up', flush=True); time.sleep(60)"
        )
        return [sys.executable, "-c", code]


def supervise(folder: Path, gpus: str) -> tuple[Broker, Supervisor]:
    """A supervisor with a slot for each of `gpus`, whose broker hears of no worker but from the test."""
    plans = plan_workers(settings_of("--model", "m", "--device", "cpu", "--gpus", gpus), FoundGpus((), "", {}))
    broker = Broker("127.0.0.1", 0, f"ipc://{folder}/workers")
    broker.start()
    return broker, Supervisor(PoorEnd("", 1.0, "text"), plans, broker)


def test_a_dismissed_worker_is_not_replaced_however_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Would break if a worker drained by name came back because its engine's end was untidy, or hung for ever."""
    monkeypatch.setattr("teacher_server.cli.supervisor._LEAVE_S", 0.2)
    broker, supervisor = supervise(tmp_path, "a,stubborn")
    try:
        pids, up = supervisor.pids, ""
        while up.count("up") < 2:  # what a worker prints goes to stderr
            up += capfd.readouterr().err
            time.sleep(0.02)
        for name in ("w0.0", "w1.0"):
            broker.events.put(WorkerEvent("ready", name, ""))
            broker.events.put(WorkerEvent("dismissed", name, ""))
        supervisor.check()
        for pid in pids:
            os.kill(pid, signal.SIGUSR1)

        def all_left() -> bool:
            supervisor.check()
            return not supervisor.pids

        wait_until(all_left, 10.0, "both to have left")
        assert not any(is_alive(pid) for pid in pids) and supervisor.all_ready
    finally:
        supervisor.stop()
        broker.stop()


def test_a_worker_lost_while_others_load_is_restarted(tmp_path: Path) -> None:
    """Would break if one crash in the minutes until the last worker has loaded ended those that serve already."""
    broker, supervisor = supervise(tmp_path, "a,b")
    try:
        first, loading = supervisor.pids
        broker.events.put(WorkerEvent("ready", "w0.0", ""))
        supervisor.check()
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: not is_alive(first), 5.0, "the worker's end")
        supervisor.check()
        assert supervisor.pids[0] != first and supervisor.pids[1] == loading and not supervisor.all_ready
        os.kill(loading, signal.SIGKILL)  # this one was never ready
        wait_until(lambda: not is_alive(loading), 5.0, "the other worker's end")
        with pytest.raises(ServerError, match=r"w1\.0.*before it was ready"):
            supervisor.check()
    finally:
        supervisor.stop()
        broker.stop()
