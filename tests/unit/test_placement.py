"""The choice of nodes, compared with all possible choices, and the division of a CPU machine's cores."""

from __future__ import annotations

import os
from itertools import combinations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gkd.cluster.placement import Node, PoolSpec, Room, in_order, place, shortage
from gkd.config.load import load_config
from gkd.start.pools import cpu_threads, worker_env

SIZES = st.integers(0, 4)
ROOMS = st.lists(st.builds(Room, gpus=SIZES.map(float), cpus=SIZES.map(float)), min_size=0, max_size=4)
SPECS = st.builds(
    PoolSpec,
    name=st.sampled_from(["actor", "rollout"]),
    nnodes=st.integers(1, 3),
    workers_per_node=st.integers(1, 2),
    gpus_per_worker=st.integers(1, 2),
    helper_cpus=st.sampled_from([0.0, 0.1]),
)


def pool(name: str, nnodes: int, gpus: int) -> PoolSpec:
    return PoolSpec(name, nnodes, gpus, gpus_per_worker=1)


def rooms(*gpus: float) -> list[Room]:
    return [Room(float(count), 64.0) for count in gpus]


def fits(chosen: tuple[tuple[int, ...], ...], rooms: list[Room], specs: list[PoolSpec]) -> bool:
    for i, room in enumerate(rooms):
        needs = [spec.each_node for spec, its in zip(specs, chosen, strict=True) if i in its]
        gpus, cpus = sum(need.gpus for need in needs), sum(need.cpus for need in needs)
        if gpus > room.gpus or cpus > room.cpus + 1e-6:
            return False
    return True


def shared(chosen: list[list[int]] | tuple[tuple[int, ...], ...]) -> int:
    return sum(sum(i in its for its in chosen) > 1 for i in range(4))


@settings(max_examples=300)
@given(ROOMS, st.lists(SPECS, min_size=1, max_size=2))
def test_choice_against_all_choices(has: list[Room], specs: list[PoolSpec]) -> None:
    """Fails if pools that fit are refused, a pool gets a node twice, a node is overloaded, or a node is shared
    without need.
    """
    every = product(*(combinations(range(len(has)), spec.nnodes) for spec in specs))
    possible = [chosen for chosen in every if fits(chosen, has, specs)]
    chosen = place(has, specs)
    assert (chosen is None) == (not possible)
    if chosen is not None:
        assert tuple(map(tuple, chosen)) in possible  # also checks that the indices are distinct and ascending
        assert shared(chosen) == min(map(shared, possible))
        assert place(has, specs) == chosen


def test_the_first_pool_gets_the_first_nodes() -> None:
    """Fails if the second pool comes first, pools interleave, or nodes are shared without need."""
    actor, rollout = pool("actor", 2, 4), pool("rollout", 1, 8)
    assert place(rooms(8, 8, 8), [actor, rollout]) == [[0, 1], [2]]
    assert place(rooms(8, 8, 8), [rollout, actor]) == [[0], [1, 2]]
    assert place(rooms(8, 4, 4), [actor, rollout]) == [[1, 2], [0]]  # the only node that is large enough
    assert place(rooms(0, 8, 4, 12), [actor, rollout]) == [[1, 2], [3]]  # a head node without GPUs
    assert place(rooms(8), [pool("actor", 1, 4), pool("rollout", 1, 4)]) == [[0], [0]]
    assert place(rooms(8, 8), [pool("actor", 1, 4), pool("rollout", 1, 4)]) == [[0], [1]]
    assert place(rooms(12, 12), [actor, rollout]) == [[0, 1], [1]]
    assert place(rooms(8, 8, 8), [pool("actor", 2, 4), pool("rollout", 2, 4)]) == [[0, 1], [1, 2]]
    assert place(rooms(7, 11), [actor, rollout]) is None
    assert place(rooms(8.5, 3.9), [pool("actor", 1, 4), pool("rollout", 1, 4)]) == [[0], [0]]


def node(address: str, gpus: tuple[float, float] = (8, 8), **known: object) -> Node:
    total, free = gpus
    return Node(id=f"id-{address}", address=address, total=Room(total, 16), free=Room(free, 15.5), **known)  # type: ignore[arg-type]


def test_nodes_are_sorted_by_number() -> None:
    """Fails if 10.0.0.10 comes before 10.0.0.9, or the result depends on the order in which Ray lists the nodes."""
    addresses = ["10.0.0.10", "10.0.0.9", "9.255.0.1", "fd00::2", "a-name", "10.0.1.1"]
    nodes = [*map(node, addresses), node("10.0.2.0", is_drivers=True), node("10.0.0.9", port=1)]
    want = ["10.0.2.0", "9.255.0.1", "10.0.0.9", "10.0.0.9", "10.0.0.10", "10.0.1.1", "fd00::2", "a-name"]
    for given_ in (nodes, nodes[::-1]):
        assert [node.address for node in in_order(given_)] == want
        assert [node.port for node in in_order(given_)][2:4] == [0, 1]


def test_description_of_a_shortage() -> None:
    """Fails if the text lacks the requirements, the pool that lacks resources, or the resources of each node."""
    nodes = [node("10.0.0.1", (8, 2), is_drivers=True), node("10.0.0.2", (4, 4))]
    specs = [PoolSpec("actor", 2, 4, 1, helper_cpus=0.1), PoolSpec("rollout", 1, 2, gpus_per_worker=2)]
    text = shortage(nodes, specs, free=True)
    for token in ("4.4 CPUs", "rollout 1 node", "actor: 1 of 2 nodes", "GPU 8 (2 free)", "10.0.0.2: GPU 4 (4 free)"):
        assert token in text, text
    together = shortage(nodes[1:], [pool("actor", 1, 4), pool("rollout", 1, 4)], free=False)
    assert "actor and rollout" in together and " of 1 node" not in together
    freed = shortage(nodes, [PoolSpec("actor", 2, 4, 1)], free=False)
    assert " of 2 nodes" not in freed and "10.0.0.2" in freed
    assert "rollout: 0 of 1 node" in shortage([], specs, free=False)


@pytest.mark.parametrize(
    ("scheduler", "ranks", "engines", "expected"),
    [
        ("sync", 1, 1, (8, 8)),
        ("sync", 4, 2, (2, 4)),
        ("one_step_off", 1, 1, (4, 4)),
        ("stream", 2, 1, (2, 4)),
        ("stream", 16, 16, (1, 1)),
    ],
)
def test_roles_that_take_turns_have_all_cores(
    scheduler: str, ranks: int, engines: int, expected: tuple[int, int]
) -> None:
    """Fails if a role idles cores while the other waits, or both together use more than there are."""
    sizes = [f"trainer.n_gpus_per_node={ranks}", f"rollout.n_gpus_per_node={engines}", "trainer.cpu_cores=8"]
    assert cpu_threads(load_config(None, [*sizes, f"trainer.scheduler={scheduler}"])) == expected


def test_the_default_is_what_this_process_may_use() -> None:
    """Fails if a job that was given two of a host's cores starts threads for all of them."""
    assert cpu_threads(load_config(None)) == (len(os.sched_getaffinity(0)),) * 2


def test_workers_on_the_cpu_have_their_threads() -> None:
    """Fails if the number does not reach the libraries, which read it at their import."""
    assert worker_env(True, n_threads=3)["OMP_NUM_THREADS"] == "3"
    assert worker_env(True)["OMP_NUM_THREADS"] == "1" and "OMP_NUM_THREADS" not in worker_env(False, n_threads=3)
