"""Make a pool on the GPUs of another pool (`trainer.colocate`).

Ray assigns a GPU to one process, or fractions of it that have no relation to memory. The processes of the colocated
pool therefore request no GPU from Ray; CUDA_VISIBLE_DEVICES names the GPUs of the ranks that own them.
"""

from __future__ import annotations

from typing import Any

import ray

from gkd.cluster.calls import gather
from gkd.cluster.placement import PoolSpec
from gkd.cluster.slots import Pool


@ray.remote(num_cpus=0, num_gpus=1, max_retries=0)
def _gpus() -> list[str]:
    return [str(gpu) for gpu in ray.get_gpu_ids()]


def colocated_pool(owner: Pool, spec: PoolSpec, timeout_s: float) -> Pool:
    """Return the slots of `spec`, each on adjacent GPUs of the owner's ranks. Starts no process.

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
