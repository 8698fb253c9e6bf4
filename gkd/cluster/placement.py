"""Choose the nodes of each pool from the resources of the nodes. `pools` requests exactly this choice from Ray.

A pure function: the result is the same at every start, and can be tested without a cluster.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import NamedTuple

_ROUNDING = 1e-6  # Ray counts CPUs in units of 1e-4


class Room(NamedTuple):
    """Total or free resources of a node."""

    gpus: float
    cpus: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A live node of the cluster."""

    id: str  # Ray's
    address: str
    port: int = 0  # port of its daemon; distinguishes nodes with the same address
    total: Room
    free: Room
    is_drivers: bool = False


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """`nnodes` x `workers_per_node` processes of `gpus_per_worker` GPUs (or process slots) each.

    Args:
        helper_cpus: CPUs for the helpers of each process, reserved in addition to its own CPU.
    """

    name: str
    nnodes: int
    workers_per_node: int
    gpus_per_worker: int
    helper_cpus: float = 0.0
    unit: str = "rank"  # what one process is called

    def rank_name(self, rank: int) -> str:
        return f"{self.name} {self.unit} {rank}"

    @property
    def world_size(self) -> int:
        return self.nnodes * self.workers_per_node

    @property
    def n_gpus(self) -> int:
        return self.world_size * self.gpus_per_worker

    @property
    def each_node(self) -> Room:
        """Return the resources that the pool requires on each of its nodes."""
        return Room(self.workers_per_node * self.gpus_per_worker, self.workers_per_node * (1.0 + self.helper_cpus))


def in_order(nodes: Sequence[Node]) -> list[Node]:
    """Sort by address (10.0.0.9 before 10.0.0.10), the driver's node first: a single-node run needs its folders."""

    def key(node: Node) -> tuple[bool, int, int, str, int, str]:
        try:
            address = ipaddress.ip_address(node.address)
        except ValueError:  # a host name
            return not node.is_drivers, 99, 0, node.address, node.port, node.id
        return not node.is_drivers, address.version, int(address), "", node.port, node.id

    return sorted(nodes, key=key)


def place(rooms: Sequence[Room], pools: Sequence[PoolSpec]) -> list[list[int]] | None:
    """Choose the nodes of each pool.

    As few nodes as possible hold more than one pool. Among these choices, the first pool gets the earliest nodes, then
    the next pool, so pools interleave only if necessary.

    Args:
        rooms: resources of the nodes.

    Returns:
        For each pool its node indices, ascending, each at most once; None if the pools do not fit.
    """
    wanted = tuple(pool.nnodes for pool in pools)
    # least[i][left]: minimum number of shared nodes if `left` nodes of each pool are taken from rooms[i:]; absent if
    # impossible.
    least: list[dict[tuple[int, ...], int]] = [{(0,) * len(pools): 0}]
    for room in reversed(rooms):
        after = least[0]
        here = {}
        for left in product(*(range(count + 1) for count in wanted)):
            costs = [after[rest] + (len(chosen) > 1) for chosen, rest in _choices(room, pools, left) if rest in after]
            if costs:
                here[left] = min(costs)
        least.insert(0, here)
    if wanted not in least[0]:
        return None
    taken: list[list[int]] = [[] for _ in pools]
    left = wanted
    for i, room in enumerate(rooms):
        after = least[i + 1]
        best = least[i][left]
        chosen, left = next(
            (chosen, rest)
            for chosen, rest in _choices(room, pools, left)
            if rest in after and after[rest] + (len(chosen) > 1) == best
        )
        for pool in chosen:
            taken[pool].append(i)
    return taken


def shortage(nodes: Sequence[Node], pools: Sequence[PoolSpec], *, free: bool) -> str:
    """Describe in one line what is required, which pool lacks resources, and what each node has.

    Args:
        free: compare with the free resources instead of the total.
    """
    rooms = [node.free if free else node.total for node in nodes]
    needs = ", ".join(f"{pool.name} {_nodes(pool.nnodes)} with {_amounts(pool.each_node)} each" for pool in pools)
    fits = {pool.name: sum(_holds(room, [pool]) for room in rooms) for pool in pools}
    short = [pool for pool in pools if fits[pool.name] < pool.nnodes]
    that = "these free" if free else "these"
    missing = "; ".join(f"{pool.name}: {fits[pool.name]} of {_nodes(pool.nnodes)} has {that}" for pool in short)
    if not short and place(rooms, pools) is None:
        missing = f"each pool fits alone, but not {' and '.join(pool.name for pool in pools)} together"
    elif not short:
        missing = "the free resources changed during the attempt"
    has = "; ".join(
        f"{node.address}{' (this one)' if node.is_drivers else ''}: GPU {node.total.gpus:g} ({node.free.gpus:g} free), "
        f"CPU {node.total.cpus:g} ({node.free.cpus:g} free)"
        for node in nodes
    )
    return f"required: {needs}; {missing}. The cluster has {_nodes(len(nodes))}: {has or 'none'}"


def _choices(
    room: Room, pools: Sequence[PoolSpec], left: tuple[int, ...]
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield (pools placed on this node, remaining nodes of each pool), in order of preference.

    Choices with the earliest pool come first, alone before with others; the empty choice comes last.
    """
    unplaced = [i for i, count in enumerate(left) if count]
    sets = [chosen for count in range(1, len(unplaced) + 1) for chosen in combinations(unplaced, count)]
    for chosen in (*sorted(sets, key=lambda chosen: chosen[0]), ()):  # a stable sort: fewer chosen first
        if _holds(room, [pools[i] for i in chosen]):
            yield chosen, tuple(n - (i in chosen) for i, n in enumerate(left))


def _holds(room: Room, pools: Sequence[PoolSpec]) -> bool:
    needs = [pool.each_node for pool in pools]
    return sum(need.gpus for need in needs) <= int(room.gpus) and (
        sum(need.cpus for need in needs) <= room.cpus + _ROUNDING
    )


def _nodes(count: int) -> str:
    return f"{count} node" if count == 1 else f"{count} nodes"


def _amounts(room: Room) -> str:
    return f"{room.gpus:g} GPUs and {room.cpus:g} CPUs"
