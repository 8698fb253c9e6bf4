"""Inject faults while clients check every reply: `python -m tests.service.chaos --faults 400`.

Three clients (one through a bad network) keep their windows full, and a fourth one reads streams of logits
and hidden states. A server with two local and two remote workers (one through a bad network) runs the
trivial engine, whose scores can be recomputed. Meanwhile processes are killed, stopped and restarted, the
network holds data or resets connections, garbage is sent to the ports, and a faulty worker joins repeatedly
and sends wrong replies.

Counters: lost (a request that never completed, or failed), wrong (scores that differ from the recomputed
ones), doubled (a future completed twice). The recovery time of a fault ends with the first completed
request that was submitted after it.
"""

from __future__ import annotations

import argparse
import bisect
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import zmq

from gkd.errors import TeacherError
from gkd.scoring.teacher.client import ZmqTeacher
from gkd.types import Rollout, TeacherScores
from teacher_server.client.admin import AdminLink
from teacher_server.wire.protocol import MAX_FRAME_BYTES
from teacher_server.wire.status import ServerStatus
from teacher_server.wire.table import TopKTable
from tests.processes import wait_until
from tests.results import write_results
from tests.service.faulty_worker import KINDS
from tests.service.harness import (
    TRIVIAL,
    ServerProcess,
    command,
    connect,
    random_rollouts,
    save_model,
    submit,
    table_of,
)
from tests.service.proxy import Proxy
from tests.service.trivial_engine import trivial_hidden, trivial_logits, trivial_topk

_VOCAB, _K, _WINDOW = 120_000, 8, 16  # 8 rows of float32 logits per message, so a stream has several messages
_WORKER_TIMEOUT_S = 1.0  # of the server under test; the default is 3
_START_S = 30.0


class CheckingClient(threading.Thread):
    """A client that keeps its window full until `finish`, and checks every reply."""

    def __init__(self, port: int, wire: str, seed: int) -> None:
        super().__init__(daemon=True)
        self.teacher: ZmqTeacher = connect(port, k=_K, wire=wire, n_in_flight=_WINDOW, request_timeout_s=5.0)
        self.times: list[tuple[float, float]] = []  # (submitted, completed)
        self.n_submitted = self.n_wrong = self.n_doubled = 0
        self.failures: list[str] = []
        self._wire, self._rollouts = wire, random_rollouts(500, _VOCAB, seed=seed)
        self._free = threading.Semaphore(_WINDOW)
        self._stopping = threading.Event()

    def run(self) -> None:
        open_requests: list[Future[list[TeacherScores]]] = []
        while not self._stopping.is_set():
            if not self._free.acquire(timeout=0.1):
                continue
            rollout, submitted_s = self._rollouts[self.n_submitted % len(self._rollouts)], time.monotonic()
            self.n_submitted += 1
            future = submit(self.teacher, rollout)
            once: list[bool] = []
            future.add_done_callback(lambda f, r=rollout, s=submitted_s, o=once: self._done(f, r, s, o))
            open_requests = [f for f in open_requests if not f.done()] + [future]
        for future in open_requests:
            future.exception(timeout=60)

    def _done(
        self, future: Future[list[TeacherScores]], rollout: Rollout, submitted_s: float, once: list[bool]
    ) -> None:
        self.n_doubled += bool(once)
        once.append(True)
        error = future.exception()
        if error is None:
            self.n_wrong += not self._is_right(rollout, table_of(future.result()))
            self.times.append((submitted_s, time.monotonic()))
        else:
            self.failures.append(str(error))
        self._free.release()

    def _is_right(self, rollout: Rollout, got: TopKTable) -> bool:
        tokens = np.concatenate([rollout.prompt_ids, rollout.response_ids])
        expected = trivial_topk(tokens, len(rollout.prompt_ids), _K, _VOCAB)
        logprobs = expected.logprobs
        if self._wire == "fp16":
            logprobs = logprobs.astype(np.float16).astype(np.float32)
        return (
            np.array_equal(got.ids, expected.ids)
            and np.array_equal(got.logprobs, logprobs)
            and np.array_equal(got.tail, expected.tail)
        )

    def finish(self) -> None:
        """Submit no more requests, and wait for the pending ones."""
        self._stopping.set()
        self.join(timeout=90)
        self.teacher.close()


class CheckingStreamClient(CheckingClient):
    """Request streams through the bad network, one at a time: logits in pieces, then hidden states."""

    def run(self) -> None:
        while not self._stopping.is_set():
            rollout, submitted_s = self._rollouts[self.n_submitted % len(self._rollouts)], time.monotonic()
            self.n_submitted += 1
            try:
                right = self._logits_is_right(rollout) if self.n_submitted % 2 else self._hidden_is_right(rollout)
            except TeacherError as error:
                self.failures.append(str(error))
                continue
            self.n_wrong += not right
            self.times.append((submitted_s, time.monotonic()))

    def _logits_is_right(self, rollout: Rollout) -> bool:
        tokens = np.concatenate([rollout.prompt_ids, rollout.response_ids])
        (scores,) = self.teacher.submit([rollout], ["logits"]).result(timeout=60)
        # No shift to apply: the largest logit of the engine is 0.
        return np.array_equal(scores.logits, trivial_logits(tokens, len(rollout.prompt_ids), _VOCAB))

    def _hidden_is_right(self, rollout: Rollout) -> bool:
        tokens = np.concatenate([rollout.prompt_ids, rollout.response_ids])
        (scores,) = self.teacher.submit([rollout], ["hidden"]).result(timeout=60)
        return np.array_equal(scores.hidden, trivial_hidden(tokens, len(rollout.prompt_ids)))


class Deployment:
    """The processes under test and the faults: every method named `do_...` injects one fault."""

    def __init__(self, folder: Path, rng: random.Random) -> None:
        self._folder, self._rng = folder, rng
        self.wrongly_excluded: set[str] = set()
        self._model = save_model(folder / "model", _VOCAB)
        self._log = (folder / "workers.log").open("wb")
        self._server = self._start_server(0, 0)
        self.port, self._worker_port = self._server.port, self._server.ready["worker_port"]
        self.client_network, self._worker_network = Proxy(self.port), Proxy(self._worker_port)
        self._remotes = [self._start_remote(self._worker_port), self._start_remote(self._worker_network.port)]
        self._faulty = subprocess.Popen(
            [sys.executable, "-m", "tests.service.faulty_worker", "--broker", f"127.0.0.1:{self._worker_port}"]
            + ["--model", str(self._model)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        wait_until(lambda: len(self._workers()) >= 4, _START_S, "all workers")

    def _start_server(self, port: int, worker_port: int) -> ServerProcess:
        options = (*TRIVIAL, "--worker-port", str(worker_port), "--worker-timeout-s", str(_WORKER_TIMEOUT_S))
        server = ServerProcess(self._model, self._folder, port=port, n_workers=2, options=options)
        server.start()
        return server.wait_until_ready()

    def _start_remote(self, port: int) -> subprocess.Popen[bytes]:
        options = ("--broker", f"127.0.0.1:{port}", "--model", str(self._model), *TRIVIAL, "--device", "cpu")
        return subprocess.Popen(command("worker", *options), stdout=subprocess.DEVNULL, stderr=self._log)

    def _status(self) -> ServerStatus:
        with AdminLink(f"tcp://127.0.0.1:{self.port}", None, timeout_s=10.0) as link:
            return link.status()

    def _workers(self) -> list[Any]:
        return [worker for worker in self._status().workers if not worker.name.startswith("faulty")]

    def _own_pid(self) -> int:
        return self._rng.choice([worker.pid for worker in self._workers() if worker.name.startswith("w")])

    @staticmethod
    def _pause(pid: int, for_s: float) -> None:
        os.kill(pid, signal.SIGSTOP)
        time.sleep(for_s)
        os.kill(pid, signal.SIGCONT)

    def do_kill_worker(self) -> None:
        os.kill(self._own_pid(), signal.SIGKILL)

    def do_kill_remote_worker(self) -> None:
        index = self._rng.randrange(2)
        self._remotes[index].kill()
        self._remotes[index].wait()
        self._remotes[index] = self._start_remote((self._worker_port, self._worker_network.port)[index])

    def do_stop_worker(self) -> None:
        self._pause(self._own_pid(), self._rng.uniform(0.3, 1.6))

    def record_excluded(self) -> None:
        """Record the correct workers that the server has excluded, before it is killed and loses the list."""
        excluded = self._status().excluded
        self.wrongly_excluded |= {f"{k}: {v}" for k, v in excluded.items() if not k.startswith("faulty")}

    def do_kill_server(self) -> None:
        self.record_excluded()
        self._server.kill()
        self._server = self._start_server(self.port, self._worker_port)

    def do_stop_server(self) -> None:
        self._pause(self._server.process.pid, self._rng.uniform(0.2, 0.8))

    def do_hold_client_network(self) -> None:
        self.client_network.hold()
        time.sleep(self._rng.uniform(0.2, 1.0))
        self.client_network.release()

    def do_cut_client_network(self) -> None:
        self.client_network.cut()

    def do_hold_worker_network(self) -> None:
        self._worker_network.hold()
        time.sleep(self._rng.uniform(0.3, 1.5))
        self._worker_network.release()

    def do_cut_worker_network(self) -> None:
        self._worker_network.cut()

    def do_send_garbage(self) -> None:
        """Send garbage, or a frame above the limit, to one of the ports."""
        with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
            socket.setsockopt(zmq.LINGER, 200)
            socket.connect(f"tcp://127.0.0.1:{self._rng.choice((self.port, self._worker_port))}")
            if self._rng.randrange(2):
                socket.send(bytes(MAX_FRAME_BYTES + 1))
            else:
                socket.send_multipart([self._rng.randbytes(40) for _ in range(self._rng.randrange(1, 300))])

    def do_faulty_worker(self, kind: str) -> None:
        assert self._faulty.stdin is not None and self._faulty.stdout is not None
        self._faulty.stdin.write(f"{kind}\n")
        self._faulty.stdin.flush()
        assert self._faulty.stdout.readline().strip() == f"did {kind}"

    def wait_for_faulty_exit(self) -> None:
        """Wait until the faulty worker of the last call has exited."""
        assert self._faulty.stdout is not None and self._faulty.stdout.readline().strip() == "gone"

    def close(self) -> None:
        for process in (self._faulty, *self._remotes):
            process.kill()
            process.wait(timeout=30)
        self._server.kill()
        self.client_network.close()
        self._worker_network.close()
        self._log.close()


PLAIN = [name.removeprefix("do_") for name in vars(Deployment) if name.startswith("do_") and name != "do_faulty_worker"]


def run_chaos(n_faults: int, n_requests: int, seed: int, folder: Path, *, say: Any = None) -> dict[str, Any]:
    """Inject at least `n_faults` faults, each kind in turn, during at least `n_requests` requests.

    Returns:
        Counters and times.
    """
    rng = random.Random(seed)
    deployment = Deployment(folder, rng)
    clients: list[CheckingClient] = []
    faults: Counter[str] = Counter()
    at: list[float] = []
    started_s = time.monotonic()
    try:
        clients = [
            CheckingClient(deployment.port, "fp16", 0),
            CheckingClient(deployment.port, "fp32", 1),
            CheckingClient(deployment.client_network.port, "fp16", 2),
        ]
        clients += [CheckingStreamClient(deployment.client_network.port, "fp32", 3)]
        for client in clients:
            client.start()
        while sum(faults.values()) < n_faults or sum(client.n_submitted for client in clients) < n_requests:
            time.sleep(rng.uniform(0.05, 0.25))
            turn = sum(faults.values())
            kind = (*PLAIN, *KINDS)[turn % (len(PLAIN) + len(KINDS))]
            at.append(time.monotonic())
            if kind in KINDS:
                deployment.do_faulty_worker(kind)
                at[-1] = time.monotonic()  # time of the fault, after its worker has joined
                deployment.wait_for_faulty_exit()
            else:
                getattr(deployment, f"do_{kind}")()
            faults[kind] += 1
            if say is not None and turn % 20 == 19:
                n_completed = sum(len(client.times) for client in clients)
                say(f"{time.monotonic() - started_s:.0f} s: {turn + 1} faults, {n_completed} requests completed")
        deployment.record_excluded()
    finally:
        for client in clients:
            client.finish()
        deployment.close()
    result = summarize(clients, faults, at, time.monotonic() - started_s)
    return result | {"honest workers excluded": sorted(deployment.wrongly_excluded)}


def summarize(clients: list[CheckingClient], faults: Counter[str], at: list[float], seconds: float) -> dict[str, Any]:
    """Return the counters and times of a run."""
    times = sorted(time_pair for client in clients for time_pair in client.times)
    submitted = [pair[0] for pair in times]
    # For each fault: the first completion of a request submitted after it.
    soonest_after = list(np.minimum.accumulate([pair[1] for pair in reversed(times)]))[::-1]
    recoveries = [soonest_after[i] - s for s in at if (i := bisect.bisect(submitted, s)) < len(submitted)]
    latencies = np.array([completed_s - submitted_s for submitted_s, completed_s in times])
    n_submitted = sum(client.n_submitted for client in clients)
    return {
        "faults": dict(faults),
        "n_faults": sum(faults.values()),
        "n_requests": n_submitted,
        "of which streams": sum(client.n_submitted for client in clients if isinstance(client, CheckingStreamClient)),
        "lost": n_submitted - len(times),
        "wrong": sum(client.n_wrong for client in clients),
        "doubled": sum(client.n_doubled for client in clients),
        "failures": [failure for client in clients for failure in client.failures][:3],
        "resent": sum(client.teacher.stats.n_resent for client in clients),
        "unwanted replies dropped": sum(client.teacher.stats.n_unwanted for client in clients),
        "recovery_s max": round(max(recoveries), 3),
        "recovery_s mean": round(float(np.mean(recoveries)), 3),
        "latency_s p50": round(float(np.quantile(latencies, 0.5)), 4),
        "latency_s p99": round(float(np.quantile(latencies, 0.99)), 3),
        "latency_s max": round(float(latencies.max()), 3),
        "seconds": round(seconds, 1),
        "worker_timeout_s": _WORKER_TIMEOUT_S,
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.service.chaos", description=__doc__)
    parser.add_argument("--faults", type=int, default=400)
    parser.add_argument("--requests", type=int, default=50_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        say = lambda text: print(text, flush=True)  # noqa: E731
        result = run_chaos(args.faults, args.requests, args.seed, Path(folder), say=say)
    print(json.dumps(result, indent=2))
    if args.json:
        write_results(args.json, result)
    bad = result["lost"] or result["wrong"] or result["doubled"] or result["honest workers excluded"]
    return int(bool(bad) or result["recovery_s max"] > 5 or result["latency_s p99"] > 2)


if __name__ == "__main__":
    sys.exit(main())
