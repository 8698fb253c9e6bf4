"""Where the teacher's workers sit: its server's status as rows of the GPU table.

The only thing that is known of the teacher's processes: they belong to no Ray and to no pool of ours.
"""

from __future__ import annotations

import os
import socket
from dataclasses import replace

from gkd.cluster.gpu_table import TEACHER, Card, Finding, RankPlace
from gkd.cluster.gpus import machine_cards
from gkd.config.schema import TeacherConfig
from gkd.errors import TeacherError
from gkd.teacher.client import load_keys
from gkd.teacher.link import POLL_S, TeacherLink
from gkd.teacher.outage import OutageClock
from teacher_server.wire.protocol import ID_BYTES, ErrorReply, ProtocolError, StatusReply, StatusRequest, requests
from teacher_server.wire.status import ServerStatus, decode_status

_LIMIT_S = 5.0
_AGAIN_S = 1.0  # a lost question costs this much


def ask_status(teacher: TeacherConfig) -> ServerStatus:
    """Who works there; blocks for some seconds at most.

    Raises:
        TeacherUnavailable: nobody answers.
        TeacherError: it answered something else.
        ConfigError: the address or teacher.keys cannot be used.
    """
    limit_s = min(_LIMIT_S, teacher.outage_budget_s)
    clock = OutageClock(outage_budget_s=limit_s, stall_budget_s=limit_s)
    link = TeacherLink(teacher.server_ip, teacher.server_port, clock, load_keys(teacher.keys))
    question = StatusRequest(request_id=os.urandom(ID_BYTES))
    next_s = 0.0
    try:
        link.begin()
        while True:
            if link.connected and clock.now_s >= next_s and link.send([requests.encode(question)]):
                next_s = clock.now_s + _AGAIN_S
            for reply, frames in link.listen(POLL_S).messages:
                if getattr(reply, "request_id", None) != question.request_id:
                    continue
                if isinstance(reply, StatusReply):
                    return decode_status(reply, frames)
                said = reply.text if isinstance(reply, ErrorReply) else type(reply).__name__
                raise TeacherError(f"teacher {link.address}: asked for its status, it answered: {said}")
            if (gone := link.unavailable("the server's status")) is not None:
                raise gone
    except ProtocolError as error:
        raise TeacherError(f"teacher {link.address}: {error}") from error
    finally:
        link.close()


def worker_places(status: ServerStatus) -> list[RankPlace]:
    """One row a worker, by host and name, with what it says of its GPUs."""
    rows: list[RankPlace] = []
    by_name = sorted(status.workers, key=lambda worker: (worker.host, len(worker.name), worker.name))  # w2.0, w10.0
    for rank, worker in enumerate(by_name):
        gpus = tuple(Card(id=gpu.id, uuid=gpu.uuid or None, name=gpu.name or None) for gpu in worker.gpus)
        rows.append(
            RankPlace(
                pool=TEACHER,
                rank=rank,
                local_rank=sum(row.host == worker.host for row in rows),
                name=worker.name,
                host=worker.host,
                pid=worker.pid,
                cuda_visible_devices=worker.cuda_visible_devices,
                current_device=0 if worker.device.startswith("cuda") else None,
                cards=gpus,
            )
        )
    return rows


def teacher_rows(teacher: TeacherConfig, device: str) -> tuple[list[RankPlace], list[Finding]]:
    """The rows of its workers, or why there are none; blocks for some seconds at most. A local teacher has none: it is
    where the actor's ranks are.

    Args:
        device: of the ranks; with "cuda", what this machine's driver knows of the workers' GPUs is added.

    Raises:
        ConfigError: the address or teacher.keys cannot be used.
    """
    if teacher.backend == "local":
        return [], []
    try:
        rows = worker_places(ask_status(teacher))
    except TeacherError as error:
        silent = Finding(
            kind="teacher_silent",
            ranks=(),
            problem=f"nobody can tell which GPUs are the teacher's: {error}.",
            fix="start it, or correct teacher.server_ip, teacher.server_port and teacher.keys.",
        )
        return [], [silent]
    return with_known_cards(rows, socket.gethostname(), machine_cards()) if device == "cuda" else rows, []


def with_known_cards(rows: list[RankPlace], host: str, machine: list[Card]) -> list[RankPlace]:
    """The rows with all that `host`'s driver knows of their GPUs; those of other hosts as they are."""
    known = {card.uuid: card for card in machine if card.uuid}
    return [
        replace(
            row,
            cards=tuple(
                replace(known[card.uuid], id=card.id) if row.host == host and card.uuid in known else card
                for card in row.cards
            ),
        )
        for row in rows
    ]
