"""Choose the GPUs that the pools may use, so that they keep off the GPUs of a teacher server on this host."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import replace

from gkd.cluster.gpu_table import GpuInfo, RankPlacement
from gkd.cluster.gpus import machine_gpus, visible_gpus
from gkd.config.schema import Config
from gkd.errors import ConfigError
from gkd.log import get_logger

log = get_logger("gpus")


def with_own_gpus(config: Config, device: str, teacher: Sequence[RankPlacement]) -> Config:
    """Return the settings with the GPUs of cluster.gpus, or with the GPUs that the teacher leaves if it is auto.

    Without GPUs of a teacher on this host, auto stays auto: Ray may assign every visible GPU. So it does if the pools
    share GPUs with the teacher (cluster.teacher_gpu_share), or if Ray already runs (cluster.ray_address), because its
    nodes have their GPUs.

    Args:
        device: of the ranks.
        teacher: rows of the teacher workers.

    Raises:
        ConfigError: naming cluster.gpus: too few GPUs are left.
    """
    cluster = config.cluster
    if device == "cpu" or cluster.gpus or cluster.ray_address or cluster.teacher_gpu_share:
        return config
    machine = machine_gpus()
    visible = visible_gpus(os.environ.get("CUDA_VISIBLE_DEVICES"), machine)
    free = free_gpus(visible, teacher, socket.gethostname())
    if len(free) == len(visible):
        return config
    n_wanted = config.derived.n_gpus
    if len(free) < n_wanted:
        taken = ", ".join(gpu.id for gpu in visible if gpu not in free)
        raise ConfigError(
            "cluster.gpus",
            "auto",
            f"the teacher server uses GPU {taken} here. The pools need {n_wanted}, and {len(free)} are left.",
            "give the teacher fewer GPUs (its --gpus), use smaller pools, or state its share of a GPU in "
            "cluster.teacher_gpu_share.",
        )
    numbers = [_number(gpu, machine) for gpu in free]
    if None in numbers:
        log.warning("cluster.gpus cannot keep off the teacher's GPUs: it names whole GPUs, and slices are visible")
        return config
    chosen = sorted(number for number in numbers if number is not None)
    log.info("cluster.gpus: %s; the teacher server uses the other GPUs of this host", chosen)
    return replace(config, cluster=replace(config.cluster, gpus=chosen))


def free_gpus(visible: Sequence[GpuInfo], teacher: Sequence[RankPlacement], host: str) -> list[GpuInfo]:
    """Return the GPUs that no teacher worker uses: by UUID, otherwise by host and id. Pure.

    Args:
        host: of the visible GPUs. Workers on the CPU have only labels, which do not count.
    """
    rows = [row for row in teacher if row.current_device is not None]
    uuids = {gpu.uuid for row in rows for gpu in row.gpus if gpu.uuid}
    ids = {gpu.id for row in rows if row.host == host for gpu in row.gpus}
    return [gpu for gpu in visible if (gpu.uuid not in uuids if gpu.uuid and uuids else gpu.id not in ids)]


def _number(gpu: GpuInfo, machine: Sequence[GpuInfo]) -> int | None:
    """Return a GPU's number, as in nvidia-smi, or None if it is a slice, or the driver does not list it."""
    ids = [other.id for other in machine if gpu.uuid and other.uuid == gpu.uuid] or [gpu.id]
    return int(ids[0]) if ids[0].isdecimal() else None
