"""Measure the clocks of the hosts that a run uses, so that spans of all processes fit together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import ray

from gkd.cluster.calls import gather
from gkd.cluster.gpu_table import RankPlacement
from gkd.handles import HostClock
from gkd.metrics.spans import measure_clock

# Pool -> name of its processes in spans.jsonl.
PROCESSES = {"actor": "actor", "rollout": "engine"}


def measure_clocks(
    rows: Sequence[RankPlacement], workers: Mapping[str, Sequence[Any]], scored_by: Sequence[int], timeout_s: float
) -> dict[str, HostClock]:
    """Return the clocks of the processes on other nodes than this one; blocks for a few round trips per node.

    Args:
        rows: placement of the ranks.
        workers: pool -> Ray actors by rank, with a method `progress`.
        scored_by: by data-parallel rank, the actor rank on whose node the scoring endpoint runs.
    """
    here = ray.get_runtime_context().get_node_id()
    by_node: dict[str, HostClock] = {}
    clocks: dict[str, HostClock] = {}
    for row in rows:
        if row.pool in PROCESSES and row.node != here:
            if row.node not in by_node:
                by_node[row.node] = measure_clock(partial(_read, workers[row.pool][row.rank], row.label, timeout_s))
            clocks[f"{PROCESSES[row.pool]} {row.rank}"] = by_node[row.node]
    owners = {f"scoring {dp_rank}": f"actor {rank}" for dp_rank, rank in enumerate(scored_by)}
    return clocks | {name: clocks[owner] for name, owner in owners.items() if owner in clocks}


def _read(worker: Any, name: str, timeout_s: float) -> float:
    return float(gather({name: worker.progress.remote()}, "reading the clock", timeout_s)[name].host_s)
