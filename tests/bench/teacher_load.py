"""Part `load`: compare eight clients of a server with the trivial engine with the same traffic through a bare proxy."""

from __future__ import annotations

import contextlib
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import psutil

from tests.bench.teacher_children import Child
from tests.bench.teacher_clients import (
    IN_FLIGHT,
    N_CLIENTS,
    N_PROMPT,
    N_RESPONSE,
    N_TOKENS,
    VOCAB,
    Measured,
    Task,
    answer_frames,
    serve_client,
    serve_echo_proxy,
    serve_echo_worker,
)
from tests.bench.teacher_report import Figure, Part, Table
from tests.service.harness import TRIVIAL, ServerProcess

K = 64
_WARM_UP_S = 1.5  # connections, and the first memory of everyone


class Sample(NamedTuple):
    """One round of one target."""

    per_s: float  # requests
    p50_s: float
    p99_s: float
    clients_cpu: float  # of all clients together, in cores
    broker_cpu: float  # broker or proxy
    workers_cpu: float


class Target(NamedTuple):
    name: str
    kind: Literal["teacher", "bare"]
    port: int
    broker_pid: int
    worker_pids: list[int]
    k: int


def load(rounds: int, seconds: float) -> Part:
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench.")))
        echo, server = _start_echo(stack, folder), _start_server(stack, folder)
        bare = server._replace(name=f"{server.name}, bare clients", kind="bare")
        targets = [echo, bare, server]
        clients = [stack.enter_context(Child(serve_client, seed)) for seed in range(N_CLIENTS)]
        for client in clients:
            client.answer()
        samples: dict[str, list[Sample]] = {target.name: [] for target in targets}
        for _ in range(rounds):
            for target in targets:
                samples[target.name].append(_measure(clients, target, seconds))
    medians = {name: Sample(*map(statistics.median, zip(*of, strict=True))) for name, of in samples.items()}

    def ratio(target: Target, base: Target) -> float:
        """Return the median ratio of requests/s over the rounds."""
        pairs = zip(samples[target.name], samples[base.name], strict=True)
        return statistics.median(a.per_s / b.per_s for a, b in pairs)

    in_kb = (4 * N_TOKENS) / 1e3
    out_kb = sum(memoryview(frame).nbytes for frame in answer_frames(K)) / 1e3
    rows = [
        (
            name,
            of.per_s,
            of.per_s * N_TOKENS / 1e3,
            of.p50_s * 1e3,
            of.p99_s * 1e3,
            of.clients_cpu,
            of.broker_cpu,
            of.workers_cpu,
        )
        for name, of in medians.items()
    ]
    columns = ("target", "requests/s", "1000 tokens/s", "p50 ms", "p99 ms", "clients", "broker or proxy", "workers")
    best = medians[server.name]
    return Part(
        "load",
        f"{N_CLIENTS} client processes with {IN_FLIGHT} requests under way each; a request is {N_PROMPT} prompt and "
        f"{N_RESPONSE} response tokens ({in_kb:.1f} kB), its answer the top-{K} ({out_kb:.0f} kB). The engine is the "
        "trivial one: no model, scores at the speed of numpy, so this is the server's own speed. Clients are "
        "`ZmqTeacher`s, which unpack and validate, or bare: they only count. The echo is the same traffic, from bare "
        "clients through a ROUTER/DEALER proxy to a worker that sends ready bytes. All processes share the cores.",
        (
            Figure("requests/s", best.per_s, at_least=1500),
            Figure("tokens/s", best.per_s * N_TOKENS, at_least=500_000),
            Figure("p99 latency", best.p99_s * 1e3, "ms", at_most=100),
            Figure(
                "server / bare echo, bare clients at both",
                ratio(bare, echo),
                at_least=0.5,
                note="what the broker's checks, its ledger and the worker cost",
            ),
            Figure(
                "server with ZmqTeacher clients / bare echo with bare clients",
                ratio(server, echo),
                note="the clients' unpacking and validation compete for the same cores",
            ),
            Figure(
                "CPU time that is the clients'",
                best.clients_cpu / (best.clients_cpu + best.broker_cpu + best.workers_cpu),
            ),
        ),
        (Table("Medians of the rounds; the last three columns are CPU cores in use", columns, rows),),
        {"rounds": rounds, "seconds": seconds, "vocabulary": VOCAB},
    )


def _start_echo(stack: contextlib.ExitStack, folder: Path) -> Target:
    endpoint = f"ipc://{folder}/echo"
    proxy = stack.enter_context(Child(serve_echo_proxy, endpoint))
    port = proxy.answer()
    worker = stack.enter_context(Child(serve_echo_worker, endpoint))
    worker.ask([K])
    return Target("bare echo, zmq.proxy", "bare", port, proxy.pid, [worker.pid], K)


def _start_server(stack: contextlib.ExitStack, folder: Path) -> Target:
    model = folder / "trivial"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"vocab_size": VOCAB, "max_position_embeddings": 4096}))
    server = stack.enter_context(ServerProcess(model, folder, options=TRIVIAL))
    return Target("server, 1 worker", "teacher", server.port, server.process.pid, server.worker_pids, K)


def _measure(clients: list[Child], target: Target, seconds: float) -> Sample:
    start_s = time.monotonic() + _WARM_UP_S
    task = Task(target.kind, target.port, target.k, start_s, start_s + seconds)
    for client in clients:
        client.post(task)
    time.sleep(max(0.0, task.start_s - time.monotonic()))
    before = [_cpu_s(target.broker_pid), sum(map(_cpu_s, target.worker_pids))]
    time.sleep(max(0.0, task.stop_s - time.monotonic()))
    used = [_cpu_s(target.broker_pid) - before[0], sum(map(_cpu_s, target.worker_pids)) - before[1]]
    measured: list[Measured] = [client.answer() for client in clients]
    latencies = np.concatenate([one.latencies_s for one in measured])
    p50, p99 = np.percentile(latencies, [50, 99])
    clients_cpu = sum(one.cpu_s for one in measured) / seconds
    return Sample(len(latencies) / seconds, float(p50), float(p99), clients_cpu, used[0] / seconds, used[1] / seconds)


def _cpu_s(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)
