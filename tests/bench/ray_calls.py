"""Time Ray's own work in the driver for one call of each kind, between real Ray actors on this host.

python -m tests.bench.ray_calls    prints one JSON object: CPU microseconds of the driver's process, all threads
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import ray

from gkd.cluster.calls import fetch, gather
from gkd.start.pools import worker_env

_N_ACTORS, _N_CHUNKS, _SIZE = 4, 50, 128
_PAUSE_S = 0.01
_N_HANDLES, _N_CALLS = 64, 128


class _Peer:
    """An engine, an endpoint and a rank."""

    @ray.method(concurrency_group="stream")
    def stream(self, n_chunks: int, pause_s: float) -> Iterator[Any]:
        for _ in range(n_chunks):
            time.sleep(pause_s)
            yield [np.ones(400, np.int32)] * _SIZE
            yield bytes(16 + 24 * _SIZE)

    @ray.method(concurrency_group="admit")
    def admit(self, session: int, encoded: bytes) -> None:
        """Do nothing."""

    def score(self, rollouts: list[Any]) -> tuple[Any, bytes]:
        return [np.ones(400, np.float32)] * len(rollouts), bytes(8 + 16 * len(rollouts))

    def call(self, *handles: Any) -> tuple[float, float]:
        return 1.0, 2.0


def measure() -> dict[str, float]:
    peer = ray.remote(num_cpus=0.1, concurrency_groups={"stream": 1, "admit": 1})(_Peer)
    peers = [peer.remote() for _ in range(_N_ACTORS)]
    names = [f"{i}" for i in range(_N_CALLS)]
    gather({name: peers[int(name) % _N_ACTORS].call.remote() for name in names}, "start", 60.0)
    used: dict[str, float] = {}

    def since(began_s: float, n: int) -> float:
        return (time.process_time() - began_s) / n * 1e6

    scored: list[tuple[Any, Any, Any]] = []

    def read(worker: Any) -> None:
        chunks = worker.stream.options(num_returns="streaming").remote(_N_CHUNKS, _PAUSE_S)
        for rollouts in chunks:
            fetch(next(chunks), "sizes")
            scored.append((rollouts, *worker.score.options(num_returns=2).remote(rollouts)))

    began_s = time.process_time()
    readers = [threading.Thread(target=read, args=(worker,)) for worker in peers]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    gather({f"{i}": summary for i, (_, _, summary) in enumerate(scored)}, "scores", 60.0)
    used["chunk"] = since(began_s, _N_ACTORS * _N_CHUNKS)  # until it is scored
    for n_handles in (0, _N_HANDLES):
        handles = [rollouts for rollouts, _, _ in scored[:n_handles]]
        began_s = time.process_time()
        gather({name: peers[int(name) % _N_ACTORS].call.remote(*handles) for name in names}, "calls", 60.0)
        used[f"call_{n_handles}"] = since(began_s, _N_CALLS)
    used["handle"] = (used.pop(f"call_{_N_HANDLES}") - used["call_0"]) / _N_HANDLES
    used["call"] = used.pop("call_0")
    began_s = time.process_time()
    scored.clear()
    handles.clear()
    time.sleep(1.0)
    used["free"] = since(began_s, _N_ACTORS * _N_CHUNKS)
    admits = [worker.admit.options(num_returns=0) for worker in peers]
    prompts = bytes(16 * (12 + 4 * 200))
    began_s = time.process_time()
    for name in names:
        admits[int(name) % _N_ACTORS].remote(1, prompts)
        time.sleep(_PAUSE_S)
    used["admit"] = since(began_s, _N_CALLS)
    began_s = time.process_time()
    time.sleep(3.0)
    used["idle_second"] = since(began_s, 3)
    return used


def main() -> int:
    limits = {"num_cpus": 2, "object_store_memory": 512 << 20}
    environment = {"env_vars": worker_env(on_cpu=True)}
    ray.init("local", include_dashboard=False, log_to_driver=False, runtime_env=environment, **limits)
    try:
        print(json.dumps(measure()))
    finally:
        ray.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
