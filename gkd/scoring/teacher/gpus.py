"""Convert the teacher server's status to rows of the GPU map, and keep the pools off its GPUs.

Teacher workers are not Ray processes, so the server's status is the only source for their GPUs.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import replace

from msgspec import structs

from gkd.cluster.gpu_table import TEACHER, Finding, GpuInfo, RankPlacement
from gkd.cluster.gpus import machine_gpus, visible_gpus
from gkd.config.schema import Config, Route
from gkd.config.schema_teacher import TeacherConfig
from gkd.errors import ConfigError, TeacherError
from gkd.log import get_logger
from gkd.scoring.teacher.client import load_keys
from gkd.scoring.teacher.link import POLL_S, TeacherLink
from gkd.scoring.teacher.outage import OutageClock
from teacher_server.wire.protocol import ID_BYTES, ErrorReply, ProtocolError, StatusReply, StatusRequest, requests
from teacher_server.wire.status import ServerStatus, decode_status

log = get_logger("gpus")

_LIMIT_S = 5.0
_RESEND_S = 1.0  # delay if a request is lost


def ask_status(teacher: TeacherConfig) -> ServerStatus:
    """Request the status of the teacher server; blocks for a few seconds at most.

    Raises:
        TeacherUnavailable: no reply in time.
        TeacherError: the reply is an error or malformed.
        ConfigError: the address or teacher.keys is invalid.
    """
    limit_s = min(_LIMIT_S, teacher.outage_budget_s)
    clock = OutageClock(outage_budget_s=limit_s, stall_budget_s=limit_s)
    link = TeacherLink(teacher.server_ip, teacher.server_port, clock, load_keys(teacher.keys))
    request = StatusRequest(request_id=os.urandom(ID_BYTES))
    next_s = 0.0
    try:
        link.begin()
        while True:
            if link.connected and clock.now_s >= next_s and link.send([requests.encode(request)]):
                next_s = clock.now_s + _RESEND_S
            for reply, frames in link.listen(POLL_S).messages:
                if getattr(reply, "request_id", None) != request.request_id:
                    continue
                if isinstance(reply, StatusReply):
                    return decode_status(reply, frames)
                problem = reply.text if isinstance(reply, ErrorReply) else type(reply).__name__
                raise TeacherError(f"teacher {link.address}: unexpected reply to a status request: {problem}")
            if (gone := link.unavailable("the server's status")) is not None:
                raise gone
    except ProtocolError as error:
        raise TeacherError(f"teacher {link.address}: {error}") from error
    finally:
        link.close()


def worker_placements(status: ServerStatus, first_rank: int = 0) -> list[RankPlacement]:
    """Return one row per worker, by host and name, with the GPUs that the worker reports."""
    rows: list[RankPlacement] = []
    by_name = sorted(status.workers, key=lambda worker: (worker.host, len(worker.name), worker.name))  # w2.0, w10.0
    for rank, worker in enumerate(by_name, first_rank):
        gpus = tuple(GpuInfo(id=gpu.id, uuid=gpu.uuid or None, name=gpu.name or None) for gpu in worker.gpus)
        rows.append(
            RankPlacement(
                pool=TEACHER,
                rank=rank,
                local_rank=sum(row.host == worker.host for row in rows),
                name=worker.name,
                host=worker.host,
                pid=worker.pid,
                cuda_visible_devices=worker.cuda_visible_devices,
                current_device=0 if worker.device.startswith("cuda") else None,
                gpus=gpus,
            )
        )
    return rows


def teacher_rows(routes: Sequence[Route], device: str) -> tuple[list[RankPlacement], list[Finding]]:
    """Return the rows of the teacher workers, and a finding for each server without a reply.

    Blocks for a few seconds per server at most. A teacher without a server has no workers.

    Args:
        device: of the ranks; with "cuda", details from this machine's driver are added.

    Raises:
        ConfigError: an address or teacher.keys is invalid.
    """
    rows: list[RankPlacement] = []
    found: list[Finding] = []
    zmq = [route for route in routes if route.teacher.backend == "zmq"]
    servers = {(route.teacher.server_ip, route.teacher.server_port): route for route in zmq}
    for route in servers.values():
        try:
            rows += worker_placements(ask_status(route.teacher), first_rank=len(rows))
        except TeacherError as error:
            address = f"{route.key('server_ip')}, {route.key('server_port')} and {route.key('keys')}"
            problem, _, start = str(error).partition(" Fix: ")
            silent = Finding(
                kind="teacher_silent",
                ranks=(),
                problem=f"the teacher's GPUs are unknown: {problem}",
                fix=f"{start or 'start the teacher server'}, or correct {address}.",
            )
            found.append(silent)
    return with_driver_info(rows, socket.gethostname(), machine_gpus()) if device == "cuda" else rows, found


def with_driver_info(rows: list[RankPlacement], host: str, machine: list[GpuInfo]) -> list[RankPlacement]:
    """Add the driver's details to the GPUs of the rows on `host`; rows of other hosts are not changed."""
    known = {gpu.uuid: gpu for gpu in machine if gpu.uuid}
    return [
        structs.replace(
            row,
            gpus=tuple(
                replace(known[gpu.uuid], id=gpu.id) if row.host == host and gpu.uuid in known else gpu
                for gpu in row.gpus
            ),
        )
        for row in rows
    ]


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
