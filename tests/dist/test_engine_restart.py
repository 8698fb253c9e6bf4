"""Test the restart of pool processes in their slots, with real Ray processes that are killed, stopped or stuck."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Set
from typing import Any

import pytest
import ray

from gkd.cluster.calls import fetch, gather
from gkd.cluster.cluster import Cluster
from gkd.cluster.gpu_table import RankPlacement
from gkd.cluster.host import process_info
from gkd.cluster.placement import PoolSpec
from gkd.cluster.pool import Pool
from gkd.cluster.startup import WATCH, this_placement
from gkd.config.schema_rollout import RolloutConfig
from gkd.errors import EngineFailed, RankFailed
from gkd.rollout.driver.recovery import Engines
from gkd.rollout.driver.restart import EngineWatch
from gkd.rollout.messages import Pulse
from tests.processes import FOREVER, wait_until

pytestmark = pytest.mark.cpu_only("Ray's slots are logical CPUs")

WAIT_S = 60.0
LIMIT_S = 8.0  # of a hang; a busy machine must not reach it
IN_PLASMA = b"x" * 200_000  # Ray keeps objects of this size in the node's store


class Engine:
    """Passes are counted by `work`; `worker` starts a process of its own, as vLLM does for each further GPU."""

    def __init__(self, rank: int) -> None:
        self._rank, self._n_passes, self._is_idle = rank, 0, True

    def place(self) -> RankPlacement:
        return this_placement("rollout", self._rank)

    def worker(self) -> int:
        process = subprocess.Popen([sys.executable, "-c", FOREVER], start_new_session=True)
        return process.pid

    @ray.method(concurrency_group=WATCH)
    def pid(self) -> int:
        return os.getpid()

    @ray.method(concurrency_group=WATCH)
    def pulse(self) -> Pulse:
        return Pulse(self._n_passes, self._is_idle)

    def work(self, seconds: float, n_passes: int) -> int:
        """Make passes for `seconds`; 0 passes: hang in the first one."""
        self._is_idle = False
        for _ in range(max(1, n_passes)):
            time.sleep(seconds / max(1, n_passes))
            self._n_passes += n_passes > 0
        self._is_idle = True
        return self._n_passes

    def chunks(self, n: int) -> Iterator[bytes]:
        for _ in range(n):
            yield IN_PLASMA
        threading.Event().wait()


_tests = itertools.count(100)


class Slots:
    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.killed: list[list[str]] = []

    def start(self, index: int, attempt: int) -> Any:
        self.killed.append(self.pool.kill(index))
        worker = self.pool.start(index, Engine, {}, concurrency_groups=[WATCH], attempt=next(_tests))
        gather({"engine": worker.pulse.remote()}, "start", WAIT_S)
        return worker

    def close(self, indices: Set[int]) -> None:
        pass

    def card(self, index: int) -> str:
        return f"host, GPU {index}"


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")  # as users set it to hide their GPUs
        cluster = Cluster("", n_slots=3, on_cpu=True)
    try:
        specs = [PoolSpec("actor", 1, 1, gpus_per_worker=1), PoolSpec("rollout", 1, 2, 1, unit="engine")]
        yield cluster.make_pools(specs, WAIT_S)["rollout"]
    finally:
        cluster.close()


@pytest.fixture
def workers(pool: Pool) -> Iterator[list[Any]]:
    test = next(_tests)  # Ray may still hold the names of the processes before
    found = [pool.start(rank, Engine, {}, concurrency_groups=[WATCH], attempt=test) for rank in range(2)]
    ray.get([worker.pid.remote() for worker in found])  # a process that starts does not reply
    yield found
    for rank in range(len(found)):
        pool.kill(rank)


def up_again(engines: Engines, index: int, old: Any) -> Any:
    def is_up() -> bool:
        engines.check()
        return engines.up().get(index, old) != old

    wait_until(is_up, WAIT_S, "another engine")
    return engines.up()[index]


def test_a_killed_process_starts_again_in_its_slot(pool: Pool, workers: list[Any]) -> None:
    """Fails if a restarted engine gets another GPU or node, children of the dead one keep the GPU's memory, or a death
    is taken for an error that a new process would raise again.
    """
    before = ray.get([worker.place.remote() for worker in workers])
    child = ray.get(workers[1].worker.remote())
    with pytest.raises(RankFailed) as caught:
        fetch(workers[1].work.remote("no number", 1), "work")
    assert caught.value.raised.startswith("TypeError: ")
    os.kill(before[1].pid, signal.SIGKILL)
    with pytest.raises(RankFailed) as caught:
        fetch(workers[1].work.remote(0.0, 1), "work")
    assert not caught.value.raised
    assert process_info(child) is not None, "the test needs an orphan"
    slots = Slots(pool)
    again = slots.start(1, 1)
    assert len(slots.killed[0]) == 1 and str(child) in slots.killed[0][0] and process_info(child) is None
    after = ray.get(again.place.remote())
    assert after.pid != before[1].pid
    assert (after.ray_gpu_ids, after.cuda_visible_devices) == (before[1].ray_gpu_ids, before[1].cuda_visible_devices)
    assert (after.host, after.node) == (before[1].host, before[1].node)
    assert ray.get(workers[0].place.remote()).pid == before[0].pid, "the other engine is not touched"
    again = slots.start(1, 2)  # a process that is alive is killed, too
    assert len(slots.killed[1]) == 1 and ray.get(again.place.remote()).pid != after.pid


def test_chunks_that_were_read_outlive_their_engine(workers: list[Any]) -> None:
    """Fails if chunks that were read before their engine died are lost, or if its death does not end the stream."""
    items = workers[0].chunks.options(num_returns="streaming").remote(2)
    read = [next(items), next(items)]
    os.kill(ray.get(workers[0].pid.remote()), signal.SIGKILL)
    with pytest.raises(RankFailed):
        fetch(workers[0].work.remote(0.0, 1), "work")  # now the process is dead
    assert [len(fetch(item, "chunk")) for item in read] == [len(IN_PLASMA)] * 2
    with pytest.raises(RankFailed):
        fetch(next(items), "chunk")
    with pytest.raises(StopIteration):
        next(items)


def died_while_idle(worker: Any) -> None:
    os.kill(ray.get(worker.place.remote()).pid, signal.SIGKILL)


def stopped(worker: Any) -> None:
    os.kill(ray.get(worker.place.remote()).pid, signal.SIGSTOP)


def stuck(worker: Any) -> None:
    worker.work.remote(600.0, 0)


@pytest.mark.parametrize("fail", [died_while_idle, pytest.param(stopped, marks=pytest.mark.slow), stuck])
def test_the_watch_finds_engines_that_nobody_calls(fail: Callable[[Any], None], pool: Pool, workers: list[Any]) -> None:
    """Fails if an engine that died while idle, is stopped or hangs in a pass is not replaced, or a busy one is."""
    engines, slots = Engines(workers, RolloutConfig(max_restarts=1)), Slots(pool)
    engines.recover_with(slots, lambda index, worker: 5)
    watch = EngineWatch(engines, LIMIT_S)
    # A hang is found within a limit and a quarter: a watch that does not count passes would replace this engine, too.
    busy = workers[0].work.remote(1.5 * LIMIT_S if fail is stuck else 0.0, 20)
    watch.start()
    try:
        fail(workers[1])
        again = up_again(engines, 1, workers[1])
        assert engines.up()[0] == workers[0] and ray.get(busy) == 20, "a busy engine is not replaced"
        assert engines.take_restarts().restarts == 1
        assert len(slots.killed[0]) == (fail is not died_while_idle)
        assert fail is not stopped or "stopped by a signal" in slots.killed[0][0], "the log shows what it did"
        died_while_idle(again)
        with pytest.raises(EngineFailed, match="GPU 1"):
            wait_until(engines.check, WAIT_S, "its failure")
    finally:
        engines.close()
        watch.close()
