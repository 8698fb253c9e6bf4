"""Convert the teacher server's status to rows of the GPU map, and keep the pools off its GPUs.

Teacher workers are not Ray processes, so the server's status is the only source for their GPUs.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

from gkd.cluster.gpu_table import TEACHER, Finding, GpuInfo, RankPlacement
from gkd.cluster.gpus import machine_gpus, visible_gpus
from gkd.config.schema import Config, Route
from gkd.errors import ConfigError
from gkd.log import get_logger
from gkd.scoring.teacher.client import load_keys, server_command
from teacher_server.client.admin import AdminLink
from teacher_server.errors import ServerError
from teacher_server.wire.status import ServerStatus

log = get_logger("gpus")


def teacher_rows(routes: Sequence[Route]) -> tuple[list[RankPlacement], list[Finding]]:
    """Return a row per teacher worker, by host and name, and a finding for each server without a reply.

    Waits for at most 5 s per server. A teacher without a server has no workers. Raises ConfigError: wrong keys.
    """
    rows: list[RankPlacement] = []
    findings: list[Finding] = []
    servers = {(r.teacher.server_ip, r.teacher.server_port): r for r in routes if r.teacher.backend == "zmq"}
    for (host, port), route in servers.items():
        keys = load_keys(route.teacher.keys)
        try:
            with AdminLink(f"tcp://{host}:{port}", keys, min(5.0, route.teacher.outage_budget_s)) as link:
                rows += _worker_rows(link.status(), len(rows))
        except ServerError as error:
            problem = f"the teacher's GPUs are unknown: {str(error).partition(' Fix: ')[0]}"
            named = f"{route.key('server_ip')}, {route.key('server_port')} and {route.key('keys')}"
            fix = f"start the teacher server ({server_command(host, port)}), or correct {named}."
            findings.append(Finding(kind="teacher_silent", problem=problem, fix=fix))
    return rows, findings


def _worker_rows(status: ServerStatus, first_rank: int) -> list[RankPlacement]:
    by_name = sorted(status.workers, key=lambda worker: (worker.host, len(worker.name), worker.name))  # w2.0, w10.0
    return [
        RankPlacement(
            pool=TEACHER,
            rank=rank,
            name=worker.name,
            host=worker.host,
            pid=worker.pid,
            cuda_visible_devices=worker.cuda_visible_devices,
            gpus=tuple(GpuInfo(id=gpu.id, uuid=gpu.uuid or None, name=gpu.name or None) for gpu in worker.gpus),
        )
        for rank, worker in enumerate(by_name, first_rank)
    ]


def with_own_gpus(config: Config, device: str, teacher: Sequence[RankPlacement]) -> Config:
    """Return the settings with the GPUs that the teacher leaves in cluster.gpus, if that one is auto.

    It stays auto without a teacher's GPU on this host, on the CPU, if the pools share GPUs with the teacher, and with
    a Ray that already runs, because its nodes have their GPUs. Raises ConfigError: too few GPUs are left.

    Args:
        device: of the ranks.
        teacher: rows of the teacher workers. On the CPU they have labels without UUID, which do not count.
    """
    cluster = config.cluster
    if device == "cpu" or cluster.gpus or cluster.ray_address or cluster.teacher_gpu_share:
        return config
    machine = machine_gpus()
    visible = visible_gpus(os.environ.get("CUDA_VISIBLE_DEVICES"), machine)
    taken = {gpu.uuid for row in teacher for gpu in row.gpus} - {None}
    free = [gpu for gpu in visible if gpu.uuid not in taken]
    if len(free) == len(visible):
        return config
    n_wanted = config.derived.n_gpus
    if len(free) < n_wanted:
        used = ", ".join(gpu.id for gpu in visible if gpu not in free)
        problem = f"the teacher server uses GPU {used} here. The pools need {n_wanted}, and {len(free)} are left."
        fix = "give the teacher fewer GPUs (its --gpus), use smaller pools, or set cluster.teacher_gpu_share."
        raise ConfigError("cluster.gpus", "auto", problem, fix)
    numbers = [int(gpu.id) for gpu in machine if gpu.uuid in {other.uuid for other in free}]
    if len(numbers) < len(free):
        log.warning("cluster.gpus cannot keep off the teacher's GPUs: it names whole GPUs, and slices are visible")
        return config
    log.info("cluster.gpus: %s; the teacher server uses the other GPUs of this host", numbers)
    return replace(config, cluster=replace(cluster, gpus=numbers))
