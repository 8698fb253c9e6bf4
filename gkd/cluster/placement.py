"""Which node each part of each pool goes to: a pure choice from what the nodes have, so that it is the same at every
start and can be tested without a cluster.

On the road of one batch: before it begins. `pools` asks Ray for exactly what is chosen here.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import NamedTuple

_ROUNDING = 1e-6  # Ray counts CPUs in units of 1e-4


class Room(NamedTuple):
    """What a node has, or has left."""

    gpus: float
    cpus: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A node of the cluster that lives."""

    id: str  # Ray's
    address: str
    port: int = 0  # of its daemon; tells nodes of one address apart
    total: Room
    free: Room
    is_drivers: bool = False


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """`nnodes` x `workers_per_node` processes of `gpus_per_worker` GPUs (or process slots) each.

    Args:
        helper_cpus: of each process's helpers, reserved with the one CPU of its own.
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
        """What it takes of each of its nodes."""
        return Room(self.workers_per_node * self.gpus_per_worker, self.workers_per_node * (1.0 + self.helper_cpus))


def in_order(nodes: Sequence[Node]) -> list[Node]:
    """The driver's node, whose folders a run on one node needs, then by address: 10.0.0.9 before 10.0.0.10."""

    def key(node: Node) -> tuple[bool, int, int, str, int, str]:
        try:
            address = ipaddress.ip_address(node.address)
        except ValueError:  # a host's name
            return not node.is_drivers, 99, 0, node.address, node.port, node.id
        return not node.is_drivers, address.version, int(address), "", node.port, node.id

    return sorted(nodes, key=key)


def place(rooms: Sequence[Room], pools: Sequence[PoolSpec]) -> list[list[int]] | None:
    """For each pool the rooms that it takes, ascending, each at most once; None: they do not fit.

    As few rooms as possible hold more than one pool. Of all such choices it is the one that gives the earliest rooms to
    the first pool, then to the next, so that pools do not interleave where they need not.
    """
    wanted = tuple(pool.nnodes for pool in pools)
    # least[i][left]: rooms shared at least where `left` nodes of each pool are to be found in rooms[i:]; absent: none.
    least: list[dict[tuple[int, ...], int]] = [{(0,) * len(pools): 0}]
    for room in reversed(rooms):
        after, here = least[0], {}
        for left in product(*(range(count + 1) for count in wanted)):
            costs = [after[rest] + (len(guests) > 1) for guests, rest in _choices(room, pools, left) if rest in after]
            if costs:
                here[left] = min(costs)
        least.insert(0, here)
    if wanted not in least[0]:
        return None
    taken: list[list[int]] = [[] for _ in pools]
    left = wanted
    for i, room in enumerate(rooms):
        after, best = least[i + 1], least[i][left]
        guests, left = next(
            (guests, rest)
            for guests, rest in _choices(room, pools, left)
            if rest in after and after[rest] + (len(guests) > 1) == best
        )
        for pool in guests:
            taken[pool].append(i)
    return taken


def shortage(nodes: Sequence[Node], pools: Sequence[PoolSpec], *, free: bool) -> str:
    """What is wanted, who is short of it, and what each node has; one line.

    Args:
        free: counts what the nodes have left, and not all that they have.
    """
    rooms = [node.free if free else node.total for node in nodes]
    each = ", ".join(f"{pool.name} {_nodes(pool.nnodes)} with {_amounts(pool.each_node)} each" for pool in pools)
    fits = {pool.name: sum(_holds(room, [pool]) for room in rooms) for pool in pools}
    short = [pool for pool in pools if fits[pool.name] < pool.nnodes]
    that = "that free" if free else "that"
    who = "; ".join(f"{pool.name} is short: {fits[pool.name]} of {_nodes(pool.nnodes)} has {that}" for pool in short)
    if not short and place(rooms, pools) is None:
        who = f"each could be had alone, not {' and '.join(pool.name for pool in pools)} together"
    elif not short:
        who = "there was room, and someone else took it or gave it back meanwhile"
    has = "; ".join(
        f"{node.address}{' (this one)' if node.is_drivers else ''}: GPU {node.total.gpus:g} ({node.free.gpus:g} free), "
        f"CPU {node.total.cpus:g} ({node.free.cpus:g} free)"
        for node in nodes
    )
    return f"wanted: {each}; {who}. The cluster has {_nodes(len(nodes))}: {has or 'none'}"


def _choices(
    room: Room, pools: Sequence[PoolSpec], left: tuple[int, ...]
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(pools that go into this room, what is left of each then), best first: the earliest, alone or with others, then
    those without it, then none.
    """
    open_ = [i for i, count in enumerate(left) if count]
    sets = [guests for count in range(1, len(open_) + 1) for guests in combinations(open_, count)]
    for guests in (*sorted(sets, key=lambda guests: guests[0]), ()):  # a stable sort: fewer guests first
        if _holds(room, [pools[i] for i in guests]):
            yield guests, tuple(n - (i in guests) for i, n in enumerate(left))


def _holds(room: Room, pools: Sequence[PoolSpec]) -> bool:
    needs = [pool.each_node for pool in pools]
    return sum(need.gpus for need in needs) <= int(room.gpus) and (
        sum(need.cpus for need in needs) <= room.cpus + _ROUNDING
    )


def _nodes(count: int) -> str:
    return f"{count} node" if count == 1 else f"{count} nodes"


def _amounts(room: Room) -> str:
    return f"{room.gpus:g} GPUs and {room.cpus:g} CPUs"
