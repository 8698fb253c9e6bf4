"""Resource pools: which processes exist, on which node, holding which GPUs.

`placement` chooses the nodes. Each process then has a Ray placement group of its own, pinned to its node and reserved
one after the other: a node gives out its lowest free GPUs first, so on each node the ids rise with the ranks, and from
the first pool to the last; and no two processes can be given the same GPU. On CPU a "GPU" is one of Ray's logical GPUs:
a process slot, so the same code, the same numbering and the same errors.
"""

from __future__ import annotations

import math
import os
import signal
import socket
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ray
from ray._private.state import available_resources_per_node
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from gkd.cluster.placement import Node, PoolSpec, Room, in_order, place, shortage
from gkd.cluster.stacks import rank_env
from gkd.errors import ClusterError
from gkd.log import get_logger

log = get_logger("pools")

# A CPU share for helpers that mostly wait (scoring endpoints), so that they never block a pool.
HELPER_CPUS = 0.1

_CONNECT_S = 10.0
# Every process of the job can be asked where it stands, from its first moment on.
_JOB_ENV = {"worker_process_setup_hook": "gkd.cluster.stacks.listen"}
_GRANT_S = 5.0  # Ray grants what is free within milliseconds
_POLL_S = 0.2
_SAY_S = 15.0  # between lines that say what is waited for
_NO_RAY_GPUS = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"
_NODE_ID = "ray.io/node-id"  # a label that every node of Ray has
_HTTP2_SETTINGS = 4  # the type of the first frame that a gRPC server sends, at once and unasked


class Cluster:
    """A Ray cluster: one started here for this run, or an existing one joined by its address.

    `run` is a word that no other run has, whichever cluster it is on.

    Args:
        address: empty: start one.
        n_slots: processes' GPUs in all, of which on CPU a cluster started here has so many.
        cpus_a_slot: logical ones that it has for each, on CPU.
        gpus: ids of the only GPUs that a cluster started here may give out; empty: all that the driver sees.

    Raises:
        ClusterError: it can't be started or joined.
    """

    def __init__(
        self,
        address: str,
        *,
        n_slots: int,
        on_cpu: bool,
        gpus: Sequence[int] = (),
        cpus_a_slot: float = 1.0 + HELPER_CPUS,
    ) -> None:
        self.run = uuid.uuid4().hex
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        common: dict[str, Any] = {"logging_level": "WARNING", "log_to_driver": True, "runtime_env": _JOB_ENV}
        local: dict[str, Any] = common | {"include_dashboard": False}
        on_sigterm = signal.getsignal(signal.SIGTERM)
        try:
            if address:
                _check_answers(address)
                ray.init(address=address, **common)
            elif on_cpu:
                # Logical: on a machine with fewer cores than slots the processes share cores.
                # "local", because without an address Ray would join whatever cluster runs on this machine.
                cpus, slots = math.ceil(n_slots * cpus_a_slot) + 2, len(gpus) or n_slots
                with _visible(gpus):
                    ray.init("local", num_cpus=cpus, num_gpus=slots, object_store_memory=512 << 20, **local)
            else:
                with _visible(gpus):
                    ray.init("local", **local)
        except (ConnectionError, RuntimeError, ValueError, RayError) as error:
            said = " ".join(str(error).split())
            fix = ""
            if "Version mismatch" in said:
                fix = " Fix: use an environment with the cluster's Ray and Python, or start Ray there with this one's."
            verb = "joined" if address else "started"
            raise ClusterError(f"Ray could not be {verb} (cluster.ray_address = {address!r}): {said}{fix}") from error
        finally:
            signal.signal(signal.SIGTERM, on_sigterm)  # ray.init puts its own there

    def make_pools(self, specs: Sequence[PoolSpec], timeout_s: float) -> dict[str, Pool]:
        """Reserve all pools or none, the first with the lowest GPU ids; by name. Waits for what others hold now.

        Raises:
            ClusterError: they can't be had, at once if they never can; shows what is wanted and what each node has.
        """
        fix = "lower the pool's n_gpus_per_node or nnodes"
        deadline, said = time.monotonic() + timeout_s, -math.inf
        while True:
            nodes = in_order(_nodes())
            if place([node.total for node in nodes], specs) is None:
                missing = shortage(nodes, specs, free=False)
                raise ClusterError(f"the pools do not fit into the cluster; {missing}. Fix: {fix}, or add nodes.")
            chosen = place([node.free for node in nodes], specs)
            if chosen is not None:
                pools = _reserve(specs, [[nodes[i].id for i in its] for its in chosen], self.run)
                if pools is not None:
                    return pools
                nodes = in_order(_nodes())
            missing, left_s = shortage(nodes, specs, free=True), deadline - time.monotonic()
            if left_s <= 0:
                raise ClusterError(
                    f"the pools' GPUs and CPUs were not free within {timeout_s:.0f} s; {missing}. "
                    f"Fix: {fix}, end what holds them, or wait longer (trainer.init_timeout_s)."
                )
            if time.monotonic() - said > _SAY_S:
                waits = "waiting up to %.0f s (trainer.init_timeout_s) for GPUs or CPUs that others hold; %s"
                log.warning(waits, left_s, missing)
                said = time.monotonic()
            time.sleep(min(_POLL_S, left_s))

    def close(self) -> None:
        """Stop Ray if it was started here, else leave it; the pools are freed with the job in both cases."""
        ray.shutdown()


@dataclass(frozen=True, slots=True)
class Pool:
    """Reserved slots; `spawn` puts one process into each."""

    spec: PoolSpec
    groups: list[PlacementGroup]  # by rank
    run: str  # a word that no other run has
    visible: tuple[str, ...] = ()  # by rank, CUDA_VISIBLE_DEVICES of a pool on another one's GPUs; empty: Ray's choice

    def named(self, workers: Sequence[Any]) -> dict[str, Any]:
        """What `spawn` gave, by the ranks' names."""
        return {self.spec.rank_name(rank): worker for rank, worker in enumerate(workers)}

    def near(self, rank: int) -> PlacementGroupSchedulingStrategy:
        """Return the strategy for a helper of this rank: on its node, in the CPUs that are reserved with it."""
        return PlacementGroupSchedulingStrategy(placement_group=self.groups[rank], placement_group_bundle_index=0)

    def spawn(self, worker_class: Any, env: dict[str, str], *, concurrency_groups: Sequence[str] = ()) -> list[Any]:
        """Create one Ray actor in each slot, in rank order, with its rank as the only argument.

        Args:
            concurrency_groups: of the class (`ray.method(concurrency_group=...)`). Their methods run while another
                method runs, in one thread per group. With any group, the other methods share one thread, which is not
                the main thread.
        """
        handles = []
        # `options` does not support the groups, and `ray.remote` no empty list of options.
        options = {"concurrency_groups": dict.fromkeys(concurrency_groups, 1)} if concurrency_groups else {}
        remote_class = ray.remote(**options)(worker_class) if options else ray.remote(worker_class)
        for rank in range(self.spec.world_size):
            # Ray would hide all GPUs from a process that it gave none.
            shown = {"CUDA_VISIBLE_DEVICES": self.visible[rank], _NO_RAY_GPUS: "1"} if self.visible else {}
            handles.append(
                remote_class.options(
                    name=f"{self.spec.name}_{rank}_{os.getpid()}",
                    num_gpus=0 if self.visible else self.spec.gpus_per_worker,
                    num_cpus=1,
                    scheduling_strategy=self.near(rank),
                    runtime_env={"env_vars": env | shown | rank_env(self.run, self.spec.rank_name(rank))},
                    max_restarts=0,
                ).remote(rank)
            )
        return handles


def _reserve(specs: Sequence[PoolSpec], nodes: Sequence[Sequence[str]], run: str) -> dict[str, Pool] | None:
    """All slots on these nodes, by Ray's ids; None: someone was faster, and nothing is held.

    All or nothing, so that two jobs that start together never wait for each other's half.
    """
    held: list[PlacementGroup] = []
    pools: dict[str, Pool] = {}
    for spec, its in zip(specs, nodes, strict=True):
        groups = []
        for rank in range(spec.world_size):
            group = placement_group(
                [{"GPU": float(spec.gpus_per_worker), "CPU": 1.0 + spec.helper_cpus}],
                strategy="STRICT_PACK",
                name=f"{spec.name}_{rank}",
                bundle_label_selector=[{_NODE_ID: its[rank // spec.workers_per_node]}],
            )
            held.append(group)
            # One after the other: this is what makes the ids rise with the ranks.
            if not group.wait(timeout_seconds=_GRANT_S):
                for taken in held:
                    remove_placement_group(taken)
                return None
            groups.append(group)
        pools[spec.name] = Pool(spec, groups, run)
    return pools


def _nodes() -> list[Node]:
    """Those that live; one that has not said yet what is free has nothing."""
    free = available_resources_per_node()
    here = ray.get_runtime_context().get_node_id()
    return [
        Node(
            id=node["NodeID"],
            address=node["NodeManagerAddress"],
            port=node["NodeManagerPort"],
            total=_room(node["Resources"]),
            free=_room(free.get(node["NodeID"], {})),
            is_drivers=node["NodeID"] == here,
        )
        for node in ray.nodes()
        if node["Alive"]
    ]


def _room(resources: Mapping[str, float]) -> Room:
    return Room(resources.get("GPU", 0.0), resources.get("CPU", 0.0))


@contextmanager
def _visible(gpus: Sequence[int]) -> Iterator[None]:
    """Ray's daemons that are started in here give out these GPUs only, lowest first; none: what they would anyway."""
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    if gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, sorted(gpus)))
    try:
        yield
    finally:
        if before is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = before
        elif gpus:
            del os.environ["CUDA_VISIBLE_DEVICES"]


def _check_answers(address: str) -> None:
    """Raises ClusterError, where ray.init would try for minutes: no Ray answers at this HOST:PORT."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdecimal():
        return  # "auto" and the like, of which Ray itself knows at once
    problem = ""
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S) as probe:
            if os.environ.get("RAY_USE_TLS", "0").lower() not in ("1", "true"):  # which begins with words of ours
                head = probe.recv(9)  # [length: 3, type, flags, stream: 4]
                if len(head) < 4 or head[3] != _HTTP2_SETTINGS:
                    problem = "what listens there is not Ray"
    except TimeoutError:
        problem = f"what listens there says nothing for {_CONNECT_S:.0f} s, or nobody is there"
    except (OSError, ValueError, OverflowError) as error:  # no name of a host, no number of a port
        problem = f"nobody listens there ({error})"
    if problem:
        raise ClusterError(
            f"Ray could not be joined (cluster.ray_address = {address!r}): {problem}. "
            f"Fix: start it (ray start --head --port {port}), or leave the key empty to have one started here."
        )
