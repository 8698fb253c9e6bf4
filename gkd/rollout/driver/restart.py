"""Start a rollout engine again in its slot: same node, same GPUs, new process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from gkd.cluster.calls import gather
from gkd.cluster.gpu_table import RankPlacement
from gkd.cluster.pool import Pool
from gkd.config.schema_rollout import RolloutConfig
from gkd.log import get_logger
from gkd.rollout.driver.recovery import Engines
from gkd.rollout.driver.watch import EngineWatch
from gkd.rollout.engine.worker import CONCURRENCY_GROUPS, RolloutWorker

log = get_logger("recovery")


class EngineSlots:
    """Implements `gkd.rollout.driver.recovery.Slots`.

    Args:
        pool: the engines' slots.
        rows: the GPU map's rows of the engines, by index.
        build: starts `init_model` on a new process; returns its ref.
        started: called with name, handle and row of the new process, before the engine builds its model.
        timeout_s: of a start.
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
        self._pool, self._env, self._rows, self._on_cpu = pool, env, list(rows), on_cpu
        self._build, self._started, self._timeout_s = build, started, timeout_s
        self._lock = threading.Lock()

    def start(self, index: int, attempt: int) -> Any:
        """See `Slots.start`. The processes of `rollout.tp` > 1 belong to the engine, too.

        Raises:
            RankFailed: the new process died or failed.
            RankTimeout: it was not ready in time.
            ClusterError: the old one does not end.
        """
        name = self._pool.spec.rank_name(index)
        killed = self._pool.kill(index)
        log.info("%s: starting it again; killed: %s", name, ", ".join(killed) or "nothing, it was dead")
        worker = self._pool.start(
            index, RolloutWorker, self._env, concurrency_groups=CONCURRENCY_GROUPS, attempt=attempt
        )
        row = gather({name: worker.placement.remote(not self._on_cpu)}, "start", self._timeout_s)[name]
        with self._lock:  # several engines may start at once
            self._started(name, worker, row)
            self._rows[index] = row
        gather({name: self._build(worker)}, "init_model", self._timeout_s)
        return worker

    def card(self, index: int) -> str:
        """See `Slots.card`."""
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
