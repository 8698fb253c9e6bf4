"""Find rollout engines that hang, or that died while idle, and start them again: same node, same GPUs, new process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError

from gkd.cluster.calls import fetch, gather
from gkd.cluster.gpu_table import RankPlacement
from gkd.cluster.pool import Pool
from gkd.config.schema_rollout import RolloutConfig
from gkd.errors import ClusterError, GkdError, RankFailed, RankTimeout
from gkd.log import get_logger
from gkd.rollout.driver.recovery import Engines
from gkd.rollout.engine.worker import CONCURRENCY_GROUPS, RolloutWorker
from gkd.rollout.messages import Pulse

log = get_logger("recovery")

_POLL_S = 5.0
_REPLY_S = 1.0  # a healthy engine replies within milliseconds


@dataclass(slots=True)
class _Watched:
    """Liveness record of one engine process."""

    worker: Any
    moved_s: float  # clock when the engine last had no work, or finished a pass
    n_passes: int = -1
    call: Any = None  # without a reply


class EngineWatch:
    """Asks each engine for its pulse, in a thread, until `close`.

    Args:
        limit_s: an engine hangs if for this time it does not reply, or finishes no pass while it has work.
    """

    def __init__(self, engines: Engines, limit_s: float) -> None:
        self._engines = engines
        self._limit_s = limit_s
        self._poll_s = min(_POLL_S, limit_s / 4)
        self._watched: dict[int, _Watched] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch engines", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """End the thread; waits for it for a moment. Idempotent."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(2 * _REPLY_S)

    def _run(self) -> None:
        last_s = time.monotonic()
        while not self._ended.wait(self._poll_s):
            if time.monotonic() - last_s > self._limit_s / 2 + self._poll_s:  # this process was stopped meanwhile
                self._watched.clear()
            try:
                self._poll()
            except GkdError as error:
                if self._engines.has_failed:  # the run ends; the training loop raises the error
                    return
                log.warning("checking the rollout engines failed and is repeated: %s", str(error))
            except (RayError, RuntimeError, ConnectionError) as error:
                if not self._ended.is_set():
                    log.warning("engines are not watched any more: %s: %s", type(error).__name__, str(error))
                return
            last_s = time.monotonic()

    def _poll(self) -> None:
        for index, worker in self._engines.up().items():
            engine = self._watched.get(index)
            if engine is None or engine.worker != worker:
                engine = self._watched[index] = _Watched(worker, time.monotonic())
            if engine.call is None:
                engine.call = worker.pulse.remote()
        calls = {engine.call: index for index, engine in self._watched.items() if engine.call is not None}
        done, _ = ray.wait(list(calls), num_returns=len(calls), timeout=_REPLY_S) if calls else ([], [])
        for ref in done:
            self._read(calls[ref])
        for index, engine in list(self._watched.items()):
            still_s = time.monotonic() - engine.moved_s
            if still_s > self._limit_s:
                what = "did not reply" if engine.call is not None else f"finished no pass after pass {engine.n_passes}"
                self._lost(index, RankTimeout(f"it hangs: it {what} for {still_s:.0f} s (rollout.hang_timeout_s)"))

    def _read(self, index: int) -> None:
        engine = self._watched[index]
        call = engine.call
        engine.call = None
        try:
            pulse: Pulse = fetch(call, f"pulse of rollout engine {index}")
        except RankFailed as error:
            self._lost(index, error)
            return
        if pulse.is_idle or pulse.n_passes != engine.n_passes:
            engine.n_passes = pulse.n_passes
            engine.moved_s = time.monotonic()

    def _lost(self, index: int, cause: GkdError) -> None:
        self._engines.lost(index, self._watched.pop(index).worker, cause)


class EngineSlots:
    """Starts the engines' processes.

    Args:
        rows: the GPU map's rows of the engines, by index.
        build: starts `init_model` on a new process; returns its ref.
        started: called with name, handle and row of the new process, before the engine builds its model.
    """

    def __init__(
        self,
        pool: Pool,
        env: dict[str, str],
        rows: Sequence[RankPlacement],
        *,
        on_cpu: bool,
        build: Callable[[Any], Any],
        started: Callable[[str, Any, RankPlacement], None],
        timeout_s: float,
    ) -> None:
        self._pool = pool
        self._env = env
        self._rows = list(rows)
        self._on_cpu = on_cpu
        self._build = build
        self._started = started
        self._timeout_s = timeout_s
        self._newest: dict[int, Any] = {}  # processes that `start` has made
        self._closed = False
        self._lock = threading.Lock()  # several engines may start at once

    def start(self, index: int, attempt: int) -> Any:
        """Kill what is left of an engine, start it in its slot and load its model; blocks. Return its handle.

        The processes of `rollout.tp` > 1 belong to the engine, too.

        Raises:
            RankFailed: the new process died or failed.
            RankTimeout: it was not ready in time.
            ClusterError: the old one does not end; or after `close`.
        """
        name = self._pool.spec.rank_name(index)
        killed = self._pool.kill(index)
        log.info("%s: starting it again; killed: %s", name, ", ".join(killed) or "nothing, it was dead")
        with self._lock:
            if self._closed:
                raise ClusterError(f"{name} is not started again: the run ends")
            worker = self._newest[index] = self._pool.start(
                index, RolloutWorker, self._env, concurrency_groups=CONCURRENCY_GROUPS, attempt=attempt
            )
        row = gather({name: worker.placement.remote(not self._on_cpu)}, "start", self._timeout_s)[name]
        with self._lock:
            self._started(name, worker, row)
            self._rows[index] = row
        gather({name: self._build(worker)}, "init_model", self._timeout_s)
        return worker

    def close(self, indices: Set[int]) -> None:
        """Start no more processes, and kill the newest ones of these engines: calls that wait for them fail."""
        with self._lock:
            self._closed = True
            for index in indices & self._newest.keys():
                ray.kill(self._newest[index])

    def card(self, index: int) -> str:
        """Return host and GPU of an engine, for messages."""
        row = self._rows[index]
        if self._on_cpu:
            return row.host
        gpus = ", ".join(gpu.uuid or gpu.id for gpu in row.gpus) or row.cuda_visible_devices or "none"
        return f"{row.host}, GPU {gpus}"


@contextmanager
def restarting(
    engines: Engines, slots: EngineSlots, restore: Callable[[int, Any], int | None], config: RolloutConfig
) -> Iterator[None]:
    """Restart engines that die or hang while the block runs; see `Engines.recover_with`."""
    engines.recover_with(slots, restore)
    watch = EngineWatch(engines, config.hang_timeout_s)
    if config.max_restarts:
        watch.start()
    try:
        yield
    finally:
        engines.close()
        watch.close()
