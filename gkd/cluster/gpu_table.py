"""Define the GPU map: one row per rank with its GPUs, the problems found; as a JSON document, and as text. Pure.

`startup.this_placement` fills a row, `gpu_findings` finds the problems.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

import msgspec

from gkd.errors import ClusterError

RUN_ENDED: Literal["run_ended"] = "run_ended"  # the only finding that is not a problem
TEACHER = "teacher"  # the pool name of the rows from the teacher server's status; not a Ray pool

Kind = Literal[
    "shared_gpu",
    "teacher_overlap",
    "too_few_gpus",
    "unset",
    "reordered",
    "split_tp_group",
    "memory_taken",
    "teacher_silent",
    "process_gone",
    "wrong_gpu",
    "outside_gpus",
    "run_ended",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuInfo:
    """One GPU. All fields except the id are None if no driver reports them, as with logical GPUs."""

    id: str  # CUDA_VISIBLE_DEVICES syntax
    uuid: str | None = None
    name: str | None = None
    pci_bus: str | None = None
    numa_node: int | None = None
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
    local_rank: int | None = None  # index among the pool's ranks of its node
    name: str = ""  # name of a teacher worker
    node: str = ""  # Ray's node id; empty if it is not a Ray process
    started: int | None = None  # clock ticks after boot; distinguishes two processes with the same pid
    ray_gpu_ids: tuple[str, ...] | None = None  # assigned by Ray; None if it is not a Ray process
    current_device: int | None = None  # index into `gpus`; None if there is no GPU, or it is unknown
    gpus: tuple[GpuInfo, ...] = msgspec.field(default=(), name="cards")  # visible ones, in order: cuda:0, cuda:1, ...

    @property
    def label(self) -> str:
        return f"{self.pool} {self.rank} ({self.name})" if self.name else f"{self.pool} {self.rank}"

    def line(self) -> str:
        return (
            f"{self.pool} worker {self.rank}: CUDA_VISIBLE_DEVICES={self.cuda_visible_devices}, "
            f"GPU count={len(self.gpus)}, host={self.host}, pid={self.pid}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolNeed:
    """GPUs that the config requests for a pool. Ranks r * tp ... (r + 1) * tp - 1 form a tensor-parallel group."""

    name: str
    n_ranks: int
    gpus_per_rank: int
    tp: int = 1
    shares_with: str = ""  # the pool that owns these GPUs; empty means this pool


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A problem, the affected ranks, and the fix; or that the run has ended."""

    kind: Kind
    ranks: tuple[str, ...]  # labels; empty if it is not about particular ranks
    problem: str
    fix: str

    def __str__(self) -> str:
        return f"{self.problem} Fix: {self.fix}"


class GpuMap(msgspec.Struct, frozen=True, kw_only=True):
    """The rows of all ranks with the problems found: `gpus.json` of a run, and the output of `check_gpus --json`."""

    device: str  # "cpu" | "cuda"
    pools: tuple[PoolNeed, ...]
    rows: tuple[RankPlacement, ...]
    findings: tuple[Finding, ...] = msgspec.field(name="verdicts")
    notes: tuple[str, ...] = ()  # checks that were skipped, with the reason; possible improvements
    gpus: tuple[int, ...] = ()  # cluster.gpus, ascending
    teacher_gpu_share: float = 0.0  # cluster.teacher_gpu_share
    ended: bool = False  # the run reached its end; its ranks were stopped
    version: Literal[1] = 1

    @property
    def has_problems(self) -> bool:
        return any(finding.kind != RUN_ENDED for finding in self.findings)

    def to_json(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n"


def gpu_map_from_json(data: bytes, where: str) -> GpuMap:
    """Decode a `GpuMap`.

    Args:
        where: name of the source, for the error.

    Raises:
        ClusterError: the bytes are not the output of `GpuMap.to_json`.
    """
    try:
        return msgspec.json.decode(data, type=GpuMap)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ClusterError(f"{where} is not the GPU table of a run: {error}") from error


# The map as a human-readable table.

_HEADS = (
    *("POOL", "RANK", "LOCAL", "HOST", "PID", "CUDA_VISIBLE_DEVICES", "GPU IDS", "VISIBLE", "CURRENT"),
    *("GPU", "UUID", "PCI BUS", "NUMA", "FREE MEMORY"),
)


def gpu_report(gpu_map: GpuMap) -> str:
    """Format one row per rank, then the settings, notes and findings. Columns without a value are left out."""
    rows = [_cells(row) for row in gpu_map.rows]
    columns = [
        (head, *cells)
        for head, *cells in zip(_HEADS, *rows, strict=True)
        if not cells or any(cell != "-" for cell in cells)
    ]
    widths = [max(map(len, column)) for column in columns]
    table = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in zip(*columns, strict=True)
    ]
    gpus = ",".join(map(str, gpu_map.gpus)) or "all"
    on_cpu = " On the CPU an id numbers a process, not a GPU." if gpu_map.device == "cpu" else ""
    settings = [f"cluster.gpus: {gpus}. The actor gets the lowest ids.{on_cpu}"]
    notes = [f"note: {_printable(note)}" for note in gpu_map.notes]
    findings = [_verdict(finding) for finding in gpu_map.findings]
    return "\n".join([*table, *settings, *notes, *(findings or ["no problems found"])])


def _cells(row: RankPlacement) -> tuple[str, ...]:
    visible = row.cuda_visible_devices
    cells = (
        row.pool,
        f"{row.rank} ({row.name})" if row.name else str(row.rank),
        _text(row.local_rank),
        row.host,
        str(row.pid),
        "unset" if visible is None else visible or "empty",
        _ids(row),
        str(len(row.gpus)),
        _text(row.current_device),
        _each(row.gpus, lambda gpu: gpu.name),
        _each(row.gpus, lambda gpu: gpu.uuid),
        _each(row.gpus, lambda gpu: gpu.pci_bus),
        _each(row.gpus, lambda gpu: gpu.numa_node),
        _each(row.gpus, _memory),
    )
    return tuple(_printable(cell) for cell in cells)


def _verdict(finding: Finding) -> str:
    if finding.kind == RUN_ENDED:
        return f"run ended: {_printable(finding.problem)}"
    return f"WRONG {finding.kind}: {_printable(str(finding))}"


def _ids(row: RankPlacement) -> str:
    """Return the ids that Ray assigned, or that a teacher's worker announces: without a GPU the labels of --gpus."""
    if row.ray_gpu_ids is not None:
        return ",".join(row.ray_gpu_ids)
    return ",".join(gpu.id for gpu in row.gpus) or ("cpu" if row.pool == TEACHER else "-")


def _each(gpus: Iterable[GpuInfo], field: Callable[[GpuInfo], object]) -> str:
    """Format a field of every GPU; a single value if all are equal."""
    texts = [_text(field(gpu)) for gpu in gpus]
    return ", ".join(texts if len(set(texts)) > 1 else texts[:1]) or "-"


def _memory(gpu: GpuInfo) -> str | None:
    if gpu.memory_free_mib is None or gpu.memory_total_mib is None:
        return None
    return f"{gpu.memory_free_mib / 1024:.1f} of {gpu.memory_total_mib / 1024:.1f} GiB"


def _text(value: object) -> str:
    return "-" if value is None else str(value)


def _printable(text: str) -> str:
    """Replace control characters: a teacher worker chooses its name, and must not control the terminal."""
    return "".join(char if char.isprintable() else "?" for char in text)
