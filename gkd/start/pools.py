"""The resource pools of a run: `actor` trains the student, `rollout` generates with its weights.

    actor     trainer.nnodes x trainer.n_gpus_per_node processes, a GPU each
    rollout   rollout.nnodes x rollout.n_gpus_per_node / rollout.tp engines, rollout.tp GPUs each; with
              trainer.colocate they share the actor's GPUs

`gkd.cluster` reserves them in Ray.
"""

from __future__ import annotations

from dataclasses import replace

from gkd.cluster.cluster import HELPER_CPUS, Cluster
from gkd.cluster.placement import PoolSpec
from gkd.cluster.pool import Pool, colocated_pool
from gkd.config.schema import Config
from gkd.config.schema_teacher import ACTOR, ROLLOUT


def pool_specs(config: Config) -> tuple[PoolSpec, PoolSpec]:
    """Return the specs of (actor, rollout): one process per GPU, and one per engine."""
    t, r = config.trainer, config.rollout
    return (
        PoolSpec(ACTOR, t.nnodes, t.n_gpus_per_node, gpus_per_worker=1, helper_cpus=HELPER_CPUS),
        PoolSpec(ROLLOUT, r.nnodes, r.n_gpus_per_node // r.tp, gpus_per_worker=r.tp, unit="engine"),
    )


def pools_in_order(config: Config) -> list[PoolSpec]:
    """Return the pools with GPUs of their own. The actor's comes first, so it gets the lowest ids and first nodes."""
    actor, rollout = pool_specs(config)
    if config.trainer.colocate:
        return [replace(actor, helper_cpus=actor.helper_cpus + 1.0)]  # each rank shares its slot with an engine
    return [actor, rollout]


def make_cluster(config: Config, *, on_cpu: bool) -> Cluster:
    """Start or join Ray, with GPUs or slots for all pools. Raises ClusterError: it cannot."""
    own = pools_in_order(config)
    return Cluster(
        config.cluster.ray_address,
        n_slots=sum(spec.n_gpus for spec in own),
        on_cpu=on_cpu,
        gpus=config.cluster.gpus,
        cpus_a_slot=1.0 + max(HELPER_CPUS, *(spec.helper_cpus for spec in own)),
    )


def make_pools(cluster: Cluster, config: Config, timeout_s: float) -> dict[str, Pool]:
    """Reserve the pools and return them by name. Raises as `Cluster.make_pools` and `colocated_pool`."""
    pools = cluster.make_pools(pools_in_order(config), timeout_s)
    if config.trainer.colocate:
        pools[ROLLOUT] = colocated_pool(pools[ACTOR], pool_specs(config)[1], timeout_s)
    return pools


def shares_with(config: Config) -> str:
    """Return the pool whose GPUs the engines share; empty if they have their own."""
    return ACTOR if config.trainer.colocate else ""
