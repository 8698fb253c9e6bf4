"""Several Ray nodes on one machine: real daemons, each with logical GPUs and an address."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import ray
from ray.cluster_utils import Cluster as RayNodes

Place = tuple[str, tuple[str, ...]]  # node, GPU ids


@dataclass(frozen=True)
class NodeSpec:
    gpus: int
    cpus: int
    address: str = ""  # empty: this machine's
    visible: str = ""  # its CUDA_VISIBLE_DEVICES; empty: unset


def my_place() -> Place:
    """Return node and GPUs of a task. It is in this file because the task's process must import its module."""
    context = ray.get_runtime_context()
    return context.get_node_id(), tuple(sorted(context.get_accelerator_ids()["GPU"]))


@contextmanager
def ray_nodes(specs: Sequence[NodeSpec]) -> Iterator[str]:
    """Start the nodes and yield the cluster's address; the first node is the head. Stop all nodes afterwards."""
    nodes = RayNodes()
    try:
        with pytest.MonkeyPatch.context() as env:
            # Otherwise each node starts a process for each CPU as soon as a driver joins.
            env.setenv("RAY_prestart_worker_first_driver", "0")
            for spec in specs:
                env.delenv("CUDA_VISIBLE_DEVICES", raising=False)
                if spec.visible:
                    env.setenv("CUDA_VISIBLE_DEVICES", spec.visible)
                where = {"node_ip_address": spec.address} if spec.address else {}
                nodes.add_node(num_gpus=spec.gpus, num_cpus=spec.cpus, include_dashboard=False, **where)
        yield str(nodes.address)
    finally:
        nodes.shutdown()
