"""Where ranks sit: one row of the GPU table, what is wrong with it, and the document that holds all of it. Pure.

On the road of one batch: before it begins. `assignment` fills a row, `verdicts` judges them, `place_table` shows them.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile
from typing import Literal

import msgspec

from gkd.errors import ClusterError

TEACHER = "teacher"  # the pool of the rows that its server tells; not one of Ray's

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
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """One GPU. All but the id is None where no driver tells it, as on logical GPUs."""

    id: str  # as in CUDA_VISIBLE_DEVICES
    uuid: str | None = None
    name: str | None = None
    pci_bus: str | None = None
    numa_node: int | None = None
    memory_total_mib: int | None = None
    memory_free_mib: int | None = None
    pids: tuple[int, ...] = ()  # processes that compute on it, as far as the driver shows them


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """One row: where a rank runs, and which GPUs it was given and sees."""

    pool: str
    rank: int
    host: str
    pid: int
    cuda_visible_devices: str | None  # None = unset
    local_rank: int | None = None  # among the pool's ranks of its node
    name: str = ""  # of a teacher's worker
    node: str = ""  # Ray's id of the node; empty: not Ray's process
    started: int | None = None  # clock ticks after boot; tells two processes of one pid apart
    ray_gpu_ids: tuple[str, ...] | None = None  # what Ray gave it; None: not Ray's process
    current_device: int | None = None  # among `cards`; None: there is none, or nobody knows
    cards: tuple[Card, ...] = ()  # that it sees, in its own order: its cuda:0, cuda:1, ...

    @property
    def label(self) -> str:
        return f"{self.pool} {self.rank} ({self.name})" if self.name else f"{self.pool} {self.rank}"

    def line(self) -> str:
        return (
            f"{self.pool} worker {self.rank}: CUDA_VISIBLE_DEVICES={self.cuda_visible_devices}, "
            f"GPU count={len(self.cards)}, host={self.host}, pid={self.pid}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolNeed:
    """What the config wants of a pool: ranks r * tp ... (r + 1) * tp - 1 are one tensor-parallel group."""

    name: str
    n_ranks: int
    gpus_per_rank: int
    tp: int = 1
    shares_with: str = ""  # the pool whose GPUs these are


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something that is wrong, whom it is about, and what to do."""

    kind: Kind
    ranks: tuple[str, ...]  # labels; empty: nobody in particular
    problem: str
    fix: str

    def __str__(self) -> str:
        return f"{self.problem} Fix: {self.fix}"


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuMap:
    """The whole table with its verdicts; `gpus.json` of a run, and what `check_gpus --json` prints."""

    device: str  # "cpu" | "cuda"
    pools: tuple[PoolNeed, ...]
    rows: tuple[RankPlace, ...]
    verdicts: tuple[Finding, ...]
    notes: tuple[str, ...] = ()  # what was not looked at, and why; what is not wrong but could be better
    gpus: tuple[int, ...] = ()  # cluster.gpus, ascending
    order: tuple[str, ...] = ()  # cluster.order; empty: of a table made before there was one
    version: Literal[1] = 1

    def to_json(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n"


def survey_of(data: bytes, where: str) -> GpuMap:
    """Raises ClusterError: these bytes are no `GpuMap.to_json`."""
    try:
        return msgspec.json.decode(data, type=GpuMap)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ClusterError(f"{where} is not the GPU table of a run: {error}") from error


def visible_ids(visible: str) -> tuple[str, ...]:
    """The entries of a CUDA_VISIBLE_DEVICES that count: CUDA stops at the first that is empty or -1."""
    return tuple(takewhile(lambda entry: entry not in ("", "-1"), (part.strip() for part in visible.split(","))))
