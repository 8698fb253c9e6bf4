"""Resource pools: which processes exist, on which node, holding which GPUs.

A pool is one Ray placement group a node, so its ranks are numbered node by node and slot by slot, and the actor
pool and the rollout pool can never be given the same GPU. On CPU a "GPU" is one of Ray's logical
GPUs: a process slot, so the same code, the same numbering and the same errors.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from gkd.cluster.stacks import RANK_ENV
from gkd.errors import ClusterError

# A CPU share for helpers that mostly wait (scoring endpoints), so that they never block a pool.
HELPER_CPUS = 0.1

_CONNECT_S = 10.0
# Every process of the job can be asked where it stands, from its first moment on.
_JOB_ENV = {"worker_process_setup_hook": "gkd.cluster.stacks.listen"}


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """`nnodes` x `workers_per_node` processes of `gpus_per_worker` GPUs (or process slots) each."""

    name: str
    nnodes: int
    workers_per_node: int
    gpus_per_worker: int
    unit: str = "rank"  # what one process is called

    def rank_name(self, rank: int) -> str:
        return f"{self.name} {self.unit} {rank}"

    @property
    def world_size(self) -> int:
        return self.nnodes * self.workers_per_node

    @property
    def n_gpus(self) -> int:
        return self.world_size * self.gpus_per_worker


class Cluster:
    """A Ray cluster: one started here for this run, or an existing one joined by its address."""

    def __init__(self, address: str, *, n_slots: int, on_cpu: bool) -> None:
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        common: dict[str, Any] = {"logging_level": "WARNING", "log_to_driver": True, "runtime_env": _JOB_ENV}
        local: dict[str, Any] = common | {"include_dashboard": False}
        on_sigterm = signal.getsignal(signal.SIGTERM)
        try:
            if address:
                _check_listens(address)
                ray.init(address=address, **common)
            elif on_cpu:
                # Logical: on a machine with fewer cores than slots the processes share cores.
                # "local", because without an address Ray would join whatever cluster runs on this machine.
                ray.init("local", num_cpus=n_slots + 2, num_gpus=n_slots, object_store_memory=512 << 20, **local)
            else:
                ray.init("local", **local)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise ClusterError(f"Ray could not be started (cluster.ray_address = {address!r}): {error}") from error
        finally:
            signal.signal(signal.SIGTERM, on_sigterm)  # ray.init puts its own there

    def make_pool(self, spec: PoolSpec, timeout_s: float) -> Pool:
        """Reserve a pool's resources.

        Raises:
            ClusterError: they can't be had; shows what is wanted and what each node has free.
        """
        total = ray.cluster_resources().get("GPU", 0)
        if total < spec.n_gpus:
            raise ClusterError(
                f"{spec.name}: wants {spec.n_gpus} GPUs, the whole cluster has {total:g} ({_describe_nodes()}). "
                f"Fix: lower the pool's n_gpus_per_node or nnodes, or add nodes."
            )
        bundle = {"GPU": float(spec.gpus_per_worker), "CPU": 1.0}
        groups = [
            placement_group([dict(bundle)] * spec.workers_per_node, strategy="STRICT_PACK", name=f"{spec.name}_{node}")
            for node in range(spec.nnodes)
        ]
        for node, group in enumerate(groups):
            if not group.wait(timeout_seconds=timeout_s):
                wanted = spec.workers_per_node * spec.gpus_per_worker
                raise ClusterError(
                    f"{spec.name}: node {node + 1} of {spec.nnodes} with {wanted} GPUs and {spec.workers_per_node} "
                    f"CPUs free was not to be had within {timeout_s:.0f} s. The cluster has: {_describe_nodes()}. "
                    f"Fix: lower the pool's n_gpus_per_node or nnodes, or free GPUs."
                )
        return Pool(spec, groups)

    def close(self) -> None:
        """Stop Ray if it was started here, else leave it; the pools are freed with the job in both cases."""
        ray.shutdown()


@dataclass(frozen=True, slots=True)
class Pool:
    """Reserved slots; `spawn` puts one process into each."""

    spec: PoolSpec
    groups: list[PlacementGroup]

    def named(self, workers: Sequence[Any]) -> dict[str, Any]:
        """What `spawn` gave, by the ranks' names."""
        return {self.spec.rank_name(rank): worker for rank, worker in enumerate(workers)}

    def spawn(self, worker_class: Any, env: dict[str, str], *, beside: Sequence[str] = ()) -> list[Any]:
        """One Ray actor a slot, in rank order; each is given its rank as the only argument.

        Args:
            beside: concurrency groups of the class (`ray.method(concurrency_group=...)`), whose methods are answered
                while another one runs; one thread each. With any, the other methods share one thread, not the main one.
        """
        handles = []
        # `options` refuses the groups, and `ray.remote` an empty list of options.
        groups = {"concurrency_groups": dict.fromkeys(beside, 1)}
        remote_class = ray.remote(**groups)(worker_class) if beside else ray.remote(worker_class)
        for rank in range(self.spec.world_size):
            node, slot = divmod(rank, self.spec.workers_per_node)
            strategy = PlacementGroupSchedulingStrategy(
                placement_group=self.groups[node], placement_group_bundle_index=slot
            )
            handles.append(
                remote_class.options(
                    name=f"{self.spec.name}_{rank}_{os.getpid()}",
                    num_gpus=self.spec.gpus_per_worker,
                    num_cpus=1,
                    scheduling_strategy=strategy,
                    runtime_env={"env_vars": env | {RANK_ENV: self.spec.rank_name(rank)}},
                    max_restarts=0,
                ).remote(rank)
            )
        return handles


def _check_listens(address: str) -> None:
    """Raises ClusterError, where ray.init would try for minutes: nobody listens at this HOST:PORT."""
    host, colon, port = address.rpartition(":")
    if not colon or "://" in address or not port.isdecimal():
        return  # "auto" and the like, of which Ray itself knows at once
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_S).close()
    except (OSError, ValueError, OverflowError) as error:  # no name of a host, no number of a port
        raise ClusterError(
            f"Ray could not be joined (cluster.ray_address = {address!r}): nobody listens there ({error}). "
            f"Fix: start it (ray start --head --port {port}), or leave the key empty to have one started here."
        ) from error


def _describe_nodes() -> str:
    free = ray.available_resources()
    nodes = [
        f"{n['NodeManagerAddress']}: GPU {n['Resources'].get('GPU', 0):g}, CPU {n['Resources'].get('CPU', 0):g} in all"
        for n in ray.nodes()
        if n["Alive"]
    ]
    return "; ".join(nodes) + f"; free in the whole cluster: GPU {free.get('GPU', 0):g}, CPU {free.get('CPU', 0):g}"
