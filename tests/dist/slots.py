"""A local Ray cluster with slots for an actor pool: logical CPUs, or cards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from gkd.cluster.cluster import Cluster
from gkd.cluster.placement import PoolSpec
from gkd.cluster.pool import Pool
from tests.device import need_cards, on_cuda


@contextmanager
def actor_slots(n_ranks: int) -> Iterator[Pool]:
    need_cards(n_ranks)
    cluster = Cluster("", n_slots=n_ranks, on_cpu=not on_cuda())
    try:
        yield cluster.make_pools([PoolSpec("actor", 1, n_ranks, gpus_per_worker=1)], 240)["actor"]
    finally:
        cluster.close()
