"""Start one process per reserved slot, and start a process again in its slot."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from gkd.cluster.calls import gather
from gkd.cluster.host import Process, process_info
from gkd.cluster.placement import PoolSpec
from gkd.cluster.stacks import rank_env, ranks_here, stacks_here
from gkd.errors import ClusterError

_NO_RAY_GPUS = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"
_KILL_S = 30.0  # a killed process with a CUDA context takes seconds to end
_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Pool:
    """Reserved slots; `spawn` starts one process in each."""

    spec: PoolSpec
    groups: list[PlacementGroup]  # one per rank
    run: str  # unique id of the run
    visible: tuple[str, ...] = ()  # each rank's CUDA_VISIBLE_DEVICES in a colocated pool; empty if Ray sets it

    def named(self, workers: Sequence[Any]) -> dict[str, Any]:
        """Return the workers from `spawn` by the names of the ranks."""
        return {self.spec.rank_name(rank): worker for rank, worker in enumerate(workers)}

    def near(self, rank: int) -> PlacementGroupSchedulingStrategy:
        """Return the strategy for a helper of this rank: on its node, in the CPUs that are reserved with it."""
        return PlacementGroupSchedulingStrategy(placement_group=self.groups[rank], placement_group_bundle_index=0)

    def spawn(self, worker_class: Any, env: Mapping[str, str], *, concurrency_groups: Sequence[str] = ()) -> list[Any]:
        """Create one Ray actor in each slot, in rank order; see `start`."""
        ranks = range(self.spec.world_size)
        return [self.start(rank, worker_class, env, concurrency_groups=concurrency_groups) for rank in ranks]

    def start(
        self,
        rank: int,
        worker_class: Any,
        env: Mapping[str, str],
        *,
        concurrency_groups: Sequence[str] = (),
        attempt: int = 0,
    ) -> Any:
        """Create the Ray actor of one slot, with its rank as the only argument; returns at once.

        It starts when the slot is free, on the slot's GPUs.

        Args:
            concurrency_groups: of the class (`ray.method(concurrency_group=...)`). Their methods run while another
                method runs, in one thread per group. With any group, the other methods share one thread, which is not
                the main thread.
            attempt: 0 for the first process of the slot, then 1, 2, ...
        """
        # `options` does not support the groups, and `ray.remote` no empty list of options.
        options = {"concurrency_groups": dict.fromkeys(concurrency_groups, 1)} if concurrency_groups else {}
        remote_class = ray.remote(**options)(worker_class) if options else ray.remote(worker_class)
        # Without this, Ray hides all GPUs from a process with num_gpus=0.
        shown = {"CUDA_VISIBLE_DEVICES": self.visible[rank], _NO_RAY_GPUS: "1"} if self.visible else {}
        again = f"_again{attempt}" if attempt else ""  # Ray may still hold the name of the dead process
        return remote_class.options(
            name=f"{self.spec.name}_{rank}_{os.getpid()}{again}",
            num_gpus=0 if self.visible else self.spec.gpus_per_worker,
            num_cpus=1,
            scheduling_strategy=self.near(rank),
            runtime_env={"env_vars": {**env, **shown, **rank_env(self.run, self.spec.rank_name(rank))}},
            max_restarts=0,
        ).remote(rank)

    def kill(self, rank: int) -> list[str]:
        """Kill all processes of a rank with SIGKILL, also children that outlive it; wait until they have ended.

        Returns:
            Pid and place in the code of each process that was alive.

        Raises:
            ClusterError: a process does not end.
            RankTimeout: the rank's node does not reply.
        """
        name = self.spec.rank_name(rank)
        remote: Any = ray.remote(num_cpus=0, max_retries=0)(kill_here)
        ref = remote.options(scheduling_strategy=self.near(rank)).remote(self.run, name)
        return list(gather({name: ref}, "killing a process", 2 * _KILL_S)[name])


def kill_here(run: str, rank: str) -> list[str]:
    """Do the same as `Pool.kill` for the processes of a rank on this machine."""
    places = [f"pid {stack.pid}: {stack.where()}" for stack in stacks_here(run, rank) if stack.pid != os.getpid()]
    killed: dict[int, Process] = {}
    deadline = time.monotonic() + _KILL_S
    while True:
        owned = [pid for pid, owner in ranks_here(run).items() if owner == rank and pid != os.getpid()]
        killed |= {pid: process for pid in owned if (process := process_info(pid)) is not None}
        # A process that ends has no open files any more before its memory is free, so it is found by its pid alone.
        alive = [pid for pid, process in killed.items() if process_info(pid) == process]
        if not alive:
            return places
        if time.monotonic() > deadline:
            raise ClusterError(f"{rank}: processes {alive} did not end within {_KILL_S:g} s of SIGKILL")
        for pid in alive:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_POLL_S)


@ray.remote(num_cpus=0, num_gpus=1, max_retries=0)
def _gpus() -> list[str]:
    return [str(gpu) for gpu in ray.get_gpu_ids()]


def colocated_pool(owner: Pool, spec: PoolSpec, timeout_s: float) -> Pool:
    """Return the slots of `spec`, each on adjacent GPUs of the owner's ranks. Starts no process.

    This is `trainer.colocate`. Ray assigns a GPU to one process, or fractions of it that have no relation to
    memory. The processes of the colocated pool therefore request no GPU from Ray; CUDA_VISIBLE_DEVICES names the
    GPUs of the ranks that own them.

    Args:
        owner: pool with one GPU per rank, as many as `spec` requires, and on each node a multiple of
            `spec.gpus_per_worker`. Its slots have CPUs for both pools.

    Raises:
        ClusterError: Ray does not report the GPUs.
    """
    n_gpus = spec.gpus_per_worker
    calls: dict[str, Any] = {
        owner.spec.rank_name(rank): _gpus.options(scheduling_strategy=owner.near(rank)).remote()
        for rank in range(owner.spec.world_size)
    }
    ids = [gpu for assigned in gather(calls, "GPU ids", timeout_s).values() for gpu in assigned]
    firsts = range(0, spec.world_size * n_gpus, n_gpus)
    visible = tuple(",".join(ids[first : first + n_gpus]) for first in firsts)
    return Pool(spec, [owner.groups[first] for first in firsts], owner.run, visible)
