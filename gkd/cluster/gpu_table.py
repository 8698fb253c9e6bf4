"""Define the GPU map: one row per rank with its GPUs, the problems found; as a JSON document, and as text. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec

from gkd.errors import ClusterError

TEACHER = "teacher"  # the pool name of the rows from the teacher server's status; not a Ray pool
_NOSET = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"  # with it, Ray does not set CUDA_VISIBLE_DEVICES
_HEADS = ("RANK", "HOST", "PID", "CUDA_VISIBLE_DEVICES", "GPU IDS", "VISIBLE", "GPU", "UUID", "PCI BUS", "FREE MEMORY")


class GpuInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU. All fields except the id are None if no driver reports them, as with logical GPUs."""

    id: str  # CUDA_VISIBLE_DEVICES syntax
    uuid: str | None = None
    name: str | None = None
    pci_bus: str | None = None
    memory_total_mib: int | None = None
    memory_free_mib: int | None = None
    pids: tuple[int, ...] = ()  # compute processes on it, as far as the driver lists them


class RankPlacement(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the map: where a rank runs, which GPUs it was assigned, and which it sees."""

    pool: str
    rank: int
    host: str
    pid: int
    cuda_visible_devices: str | None  # None = unset
    name: str = ""  # name of a teacher worker
    node: str = ""  # Ray's node id; empty if it is not a Ray process
    started: int | None = None  # clock ticks after boot; distinguishes two processes with the same pid
    ray_gpu_ids: tuple[str, ...] = ()  # assigned by Ray; empty: a teacher worker, or an engine on the actor's GPUs
    gpus: tuple[GpuInfo, ...] = ()  # visible ones, in order: cuda:0, cuda:1, ...

    @property
    def label(self) -> str:
        return f"{self.pool} {self.rank} ({self.name})" if self.name else f"{self.pool} {self.rank}"

    @property
    def visible(self) -> str:
        return "unset" if self.cuda_visible_devices is None else self.cuda_visible_devices or "empty"

    @property
    def used_gpus(self) -> tuple[GpuInfo, ...]:
        """Return the first visible GPUs, as many as Ray assigned; all, if Ray assigned none."""
        return self.gpus[: len(self.ray_gpu_ids) or None]

    def line(self) -> str:
        return (
            f"{self.pool} worker {self.rank}: CUDA_VISIBLE_DEVICES={self.visible}, "
            f"GPU count={len(self.gpus)}, host={self.host}, pid={self.pid}"
        )


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """A problem, the affected ranks, and the fix."""

    kind: Literal["shared_gpu", "outside_gpus", "too_few_gpus", "teacher_overlap", "teacher_silent"]
    ranks: tuple[str, ...] = ()  # labels; empty if it is not about particular ranks
    problem: str
    fix: str

    def __str__(self) -> str:
        return f"{self.problem} Fix: {self.fix}"


class GpuMap(msgspec.Struct, frozen=True, kw_only=True):
    """The rows of all ranks with the problems found: `gpus.json` of a run, and the output of `check_gpus --json`."""

    device: str  # "cpu" | "cuda"
    rows: tuple[RankPlacement, ...]
    findings: tuple[Finding, ...]
    note: str = ""  # which rows are not of now
    gpus: tuple[int, ...] = ()  # cluster.gpus, ascending
    ended: bool = False  # the run reached its end; its ranks were stopped
    stopped: str = ""  # why it ended before: "interrupted", or the name of an error

    def to_json(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n"

    def text(self) -> str:
        """Format one row per rank, then settings, note and findings. Columns without a value are left out."""
        table = zip(_HEADS, *map(_cells, self.rows), strict=True)
        columns = [column for column in table if set(column[1:]) != {"-"}]
        widths = [max(map(len, column)) for column in columns]
        lines = ["  ".join(map(str.ljust, cells, widths)).rstrip() for cells in zip(*columns, strict=True)]
        on_cpu = " On the CPU an id numbers a process, not a GPU." if self.device == "cpu" else ""
        lines.append(f"cluster.gpus: {','.join(map(str, self.gpus)) or 'all'}. The actor gets the lowest ids.{on_cpu}")
        lines += [f"note: {self.note}"] if self.note else []
        lines += [f"WRONG {finding.kind}: {finding}" for finding in self.findings] or ["no problems found"]
        # A teacher worker chooses its name, and must not control the terminal.
        return "\n".join("".join(char if char.isprintable() else "?" for char in line) for line in lines)


def gpu_map_from_json(data: bytes, where: str) -> GpuMap:
    """Decode the output of `GpuMap.to_json`. Raises ClusterError, naming `where`: the bytes are something else."""
    try:
        return msgspec.json.decode(data, type=GpuMap)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ClusterError(f"{where} is not the GPU table of a run: {error}") from error


def find_problems(rows: Sequence[RankPlacement], gpus: Sequence[int], *, with_teacher: bool = False) -> list[Finding]:
    """Return the problems of a placement, worst first.

    Args:
        gpus: cluster.gpus, the only GPUs that the pools may use; empty means all.
        with_teacher: the pools may use the teacher's GPUs (cluster.teacher_gpu_share).
    """
    ranks = [row for row in rows if row.pool != TEACHER]
    teacher = [row for row in rows if row.pool == TEACHER and not with_teacher]
    return [*_shared(ranks), *_overlaps(ranks, teacher), *_outside(ranks, gpus), *_too_few(ranks)]


def _shared(ranks: Sequence[RankPlacement]) -> Iterator[Finding]:
    users: dict[str, list[RankPlacement]] = {}
    for row in ranks:
        for gpu in row.used_gpus:  # without UUIDs by node: simulated nodes on one host have GPUs with the same ids
            users.setdefault(gpu.uuid or f"number {gpu.id} of node {row.node}", []).append(row)
    for device, rows in users.items():
        n_owners = sum(bool(row.ray_gpu_ids) for row in rows)
        if max(n_owners, len(rows) - n_owners) > 1:  # with trainer.colocate an owner and an engine take turns
            problem = f"{_with_visible(rows)} use the same GPU, {device}."
            fix = "start Ray, or without cluster.ray_address the trainer, without "
            fix += f"{_NOSET} and with a CUDA_VISIBLE_DEVICES that names each GPU once."
            yield Finding(kind="shared_gpu", ranks=_labels(rows), problem=problem, fix=fix)


def _overlaps(ranks: Sequence[RankPlacement], teacher: Sequence[RankPlacement]) -> Iterator[Finding]:
    workers = {gpu.uuid or (row.host, gpu.id): row for row in teacher for gpu in row.gpus}
    for row in ranks:
        for gpu in row.used_gpus:
            if worker := workers.get(gpu.uuid or (row.host, gpu.id)):
                problem = f"{row.label} on {row.host} uses GPU {gpu.uuid or gpu.id} of {worker.label}."
                fix = "set other GPUs for the teacher (its --gpus) or for the trainer (cluster.gpus), or state the "
                fix += "teacher's share of them in cluster.teacher_gpu_share."
                yield Finding(kind="teacher_overlap", ranks=(row.label, worker.label), problem=problem, fix=fix)


def _outside(ranks: Sequence[RankPlacement], gpus: Sequence[int]) -> Iterator[Finding]:
    moved = [row for row in ranks if row.ray_gpu_ids and {gpu.id for gpu in row.used_gpus} - {*row.ray_gpu_ids}]
    beyond = [row for row in ranks if gpus and {*row.ray_gpu_ids} - {*map(str, gpus)}]
    ids = ",".join(map(str, gpus))
    start = f"start Ray on each node as CUDA_VISIBLE_DEVICES={ids} ray start ..., or change cluster.gpus."
    for rows, which, fix in (
        (moved, "other GPUs than Ray assigned", f"start Ray without {_NOSET}, so that it sets CUDA_VISIBLE_DEVICES."),
        (beyond, f"GPUs outside cluster.gpus [{ids}]", start),
    ):
        if rows:
            assigned = "; ".join(f"{row.label} on {row.host}: {','.join(row.ray_gpu_ids)}" for row in rows)
            problem = f"{_with_visible(rows)} use {which}. Ray assigned {assigned}."
            yield Finding(kind="outside_gpus", ranks=_labels(rows), problem=problem, fix=fix)


def _too_few(ranks: Sequence[RankPlacement]) -> Iterator[Finding]:
    if short := [row for row in ranks if len(row.used_gpus) < max(1, len(row.ray_gpu_ids))]:
        problem = f"{_with_visible(short)} see fewer GPUs than they need, or none."
        fix = "start Ray with a CUDA_VISIBLE_DEVICES that names existing GPUs, or lower the pool's n_gpus_per_node."
        yield Finding(kind="too_few_gpus", ranks=_labels(short), problem=problem, fix=fix)


def _labels(rows: Sequence[RankPlacement]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(row.label for row in rows))


def _with_visible(rows: Sequence[RankPlacement]) -> str:
    return ", ".join(f"{row.label} (CUDA_VISIBLE_DEVICES {row.visible})" for row in rows)


def _cells(row: RankPlacement) -> list[str]:
    return [
        row.label,
        row.host,
        str(row.pid),
        row.visible,
        ",".join(row.ray_gpu_ids or [gpu.id for gpu in row.gpus] or ["cpu" if row.pool == TEACHER else "-"]),
        str(len(row.gpus)),
        _each([gpu.name or "-" for gpu in row.gpus]),
        _each([gpu.uuid or "-" for gpu in row.gpus]),
        _each([gpu.pci_bus or "-" for gpu in row.gpus]),
        _each([_memory(gpu) for gpu in row.gpus]),
    ]


def _each(texts: list[str]) -> str:
    return ", ".join(texts if len(set(texts)) > 1 else texts[:1]) or "-"


def _memory(gpu: GpuInfo) -> str:
    if gpu.memory_free_mib is None or gpu.memory_total_mib is None:
        return "-"
    return f"{gpu.memory_free_mib / 1024:.1f} of {gpu.memory_total_mib / 1024:.1f} GiB"
