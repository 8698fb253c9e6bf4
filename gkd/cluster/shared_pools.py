"""A pool on the GPUs of another one: its processes sit beside the other's ranks and see the same cards.

Ray gives a GPU to one process at a time, or parts of it by numbers that say nothing of memory. So the guests ask Ray
for none, and are told which ones their hosts were given.
"""

from __future__ import annotations

from typing import Any

import ray

from gkd.cluster.calls import gather
from gkd.cluster.placement import PoolSpec
from gkd.cluster.pools import Pool


@ray.remote(num_cpus=0, num_gpus=1, max_retries=0)
def _gpus() -> list[str]:
    return [str(gpu) for gpu in ray.get_gpu_ids()]


def colocated_pool(owner: Pool, spec: PoolSpec, timeout_s: float) -> Pool:
    """The slots of `spec`, each on as many neighbouring GPUs of the owner's ranks as it wants; nothing runs there yet.

    Args:
        owner: one GPU a rank, as many of them as `spec` wants, and on each node a multiple of what a guest wants. Its
            slots have CPUs for the guests.

    Raises:
        ClusterError: Ray does not say which GPUs they are.
    """
    wanted = spec.gpus_per_worker
    asked: dict[str, Any] = {
        owner.spec.rank_name(rank): _gpus.options(scheduling_strategy=owner.near(rank)).remote()
        for rank in range(owner.spec.world_size)
    }
    ids = [gpu for given in gather(asked, "which GPUs it has", timeout_s).values() for gpu in given]
    firsts = range(0, spec.world_size * wanted, wanted)
    visible = tuple(",".join(ids[first : first + wanted]) for first in firsts)
    return Pool(spec, [owner.groups[first] for first in firsts], owner.run, visible)
