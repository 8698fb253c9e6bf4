"""Collect the placement of every rank and make the GPU map, for training and for `check_gpus`.

Training keeps the map in its run folder: it is written at the start, when an engine is restarted, and at the end.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec import structs

from gkd.cluster.calls import gather
from gkd.cluster.gpu_findings import find_problems
from gkd.cluster.gpu_table import Finding, GpuMap, PoolNeed, RankPlacement, gpu_map_from_json, gpu_report
from gkd.cluster.placement import PoolSpec
from gkd.cluster.startup import sort_visible_gpus, this_placement
from gkd.config.schema import Config
from gkd.config.schema_sections import ClusterConfig
from gkd.errors import ClusterError
from gkd.log import get_logger
from gkd.run.folder import RunFolder
from gkd.scoring.teacher.gpus import teacher_rows

log = get_logger("launcher")
_CHANGING = threading.Lock()  # engines are restarted in threads, which the end of a run does not wait for


class PlacementProbe:
    """Stand in for a training rank in `check_gpus`: same slot and environment, but only reports its placement."""

    def __init__(self, rank: int) -> None:
        sort_visible_gpus()
        self._rank = rank

    def placement(self, pool: str, ask_driver: bool) -> RankPlacement:
        return this_placement(pool, self._rank, ask_driver=ask_driver)


@dataclass(frozen=True, slots=True)
class PlacementCalls:
    """Pending placement calls on the ranks of a pool."""

    spec: PoolSpec
    tp: int  # ranks of one tensor-parallel group
    refs: Sequence[Any]  # one per rank; each returns a RankPlacement
    shares_with: str = ""  # the pool that owns these GPUs


def make_gpu_map(
    device: str,
    calls: Sequence[PlacementCalls],
    teacher: Sequence[RankPlacement],
    *,
    timeout_s: float,
    cluster: ClusterConfig,
    found: Sequence[Finding] = (),
) -> GpuMap:
    """Make the GPU map and find its problems; blocks until every rank has replied.

    Args:
        device: of the ranks, "cpu" or "cuda".
        calls: of all pools.
        teacher: rows of the teacher workers.
        cluster: the GPUs that the ranks may use.
        found: other known problems.

    Raises:
        ClusterError: a rank died or did not reply in time.
    """
    refs = {call.spec.rank_name(rank): ref for call in calls for rank, ref in enumerate(call.refs)}
    per_node = {call.spec.name: call.spec.workers_per_node for call in calls}
    ranks: list[RankPlacement] = list(gather(refs, "GPU placement", timeout_s).values())
    rows = (*(structs.replace(row, local_rank=row.rank % per_node[row.pool]) for row in ranks), *teacher)
    pools = tuple(
        PoolNeed(
            name=call.spec.name,
            n_ranks=call.spec.world_size,
            gpus_per_rank=call.spec.gpus_per_worker,
            tp=call.tp,
            shares_with=call.shares_with,
        )
        for call in calls
    )
    gpus, share = tuple(sorted(cluster.gpus)), cluster.teacher_gpu_share
    return GpuMap(
        device=device,
        pools=pools,
        rows=rows,
        findings=(*find_problems(rows, pools, gpus=gpus, teacher_gpu_share=share), *found),
        notes=tuple(non_adjacent(rows, gpus)),
        gpus=gpus,
        teacher_gpu_share=share,
    )


def non_adjacent(rows: Sequence[RankPlacement], gpus: Sequence[int]) -> Iterator[str]:
    """Yield a note for each rank whose GPUs are not adjacent: Ray assigns the lowest free GPUs."""
    for row in rows:
        ids = [int(gpu) for gpu in row.ray_gpu_ids or () if gpu.isdecimal()]
        between = [gpu for gpu in gpus or range(max(ids, default=0) + 1) if ids and min(ids) < gpu < max(ids)]
        if others := [gpu for gpu in between if gpu not in ids]:
            yield (
                f"{row.label} uses GPUs {','.join(map(str, ids))}. GPUs {','.join(map(str, others))} between them were "
                "not free; this may slow down communication"
            )


def check_can_run(table: GpuMap) -> None:
    """Raise ClusterError if two ranks share a real GPU, or a rank uses a GPU outside of cluster.gpus.

    NCCL fails or hangs with two ranks on one GPU. GPUs outside of cluster.gpus may belong to the teacher.
    """
    kinds = ("outside_gpus", "shared_gpu") if table.device == "cuda" else ("outside_gpus",)
    fatal = [str(finding) for finding in table.findings if finding.kind in kinds]
    if fatal:
        raise ClusterError(" ".join(fatal))


def record_placement(
    config: Config, device: str, folder: RunFolder, calls: Sequence[PlacementCalls], timeout_s: float
) -> GpuMap:
    """Log the table of ranks and GPUs, write it to the run folder, and return it.

    Raises ClusterError, as `check_can_run`; CheckpointError: the run folder cannot be written.
    """
    teacher, found = teacher_rows(config.derived.routes, device)
    table = make_gpu_map(device, calls, teacher, timeout_s=timeout_s, found=found, cluster=config.cluster)
    folder.write_places(table.to_json())
    log.log(logging.WARNING if table.findings else logging.INFO, "GPU placement:\n%s", gpu_report(table))
    check_can_run(table)
    return table


def record_restart(folder: RunFolder, row: RankPlacement) -> None:
    """Put a restarted rank in the place of the process before it. Raises CheckpointError."""
    with _CHANGING:
        table = _read(folder)
        rows = [
            structs.replace(row, local_rank=old.local_rank) if (old.pool, old.rank) == (row.pool, row.rank) else old
            for old in table.rows
        ]
        folder.write_places(structs.replace(table, rows=tuple(rows)).to_json())


def record_end(folder: RunFolder) -> None:
    """Note that the run has reached its end. Raises CheckpointError."""
    with _CHANGING:
        folder.write_places(structs.replace(_read(folder), ended=True).to_json())


def _read(folder: RunFolder) -> GpuMap:
    return gpu_map_from_json(folder.read_places(), str(folder.root))
