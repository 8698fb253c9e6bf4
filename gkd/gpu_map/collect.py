"""Ask every rank where it sits, and make the table of it. Training does it at its start, `check_gpus` without one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gkd.cluster.assignment import sort_visible_gpus, this_place
from gkd.cluster.calls import gather
from gkd.cluster.gpu_table import Finding, GpuMap, PoolNeed, RankPlace
from gkd.cluster.placement import PoolSpec
from gkd.config.schema import ClusterConfig
from gkd.errors import ClusterError
from gkd.gpu_map.findings import judge


class PlaceWorker:
    """A rank of `check_gpus`: it sits where training's rank would, and does nothing but say where."""

    def __init__(self, rank: int) -> None:
        sort_visible_gpus()
        self._rank = rank

    def place(self, pool: str, ask_driver: bool) -> RankPlace:
        return this_place(pool, self._rank, ask_driver=ask_driver)


@dataclass(frozen=True, slots=True)
class Asked:
    """A pool whose ranks have been asked for their places and may not have answered yet."""

    spec: PoolSpec
    tp: int  # ranks of one tensor-parallel group
    refs: Sequence[Any]  # of RankPlace, by rank
    shares_with: str = ""  # the pool whose GPUs these are

    @property
    def need(self) -> PoolNeed:
        spec = self.spec
        return PoolNeed(
            name=spec.name,
            n_ranks=spec.world_size,
            gpus_per_rank=spec.gpus_per_worker,
            tp=self.tp,
            shares_with=self.shares_with,
        )


def places(asked: Sequence[Asked], timeout_s: float) -> list[RankPlace]:
    """Every rank's row, pool by pool. Raises ClusterError: a rank died or did not answer in time."""
    refs = {pool.spec.rank_name(rank): ref for pool in asked for rank, ref in enumerate(pool.refs)}
    per_node = {pool.spec.name: pool.spec.workers_per_node for pool in asked}
    rows: list[RankPlace] = list(gather(refs, "where it sits", timeout_s).values())
    return [replace(row, local_rank=row.rank % per_node[row.pool]) for row in rows]


def survey(
    device: str,
    asked: Sequence[Asked],
    teacher: Sequence[RankPlace],
    *,
    timeout_s: float,
    cluster: ClusterConfig,
    found: Sequence[Finding] = (),
) -> GpuMap:
    """The table and its verdicts; blocks until every rank has answered.

    Args:
        device: of the ranks, "cpu" or "cuda".
        teacher: its workers' rows.
        cluster: which GPUs the ranks may use, and which pool comes first.
        found: what else is known to be wrong.

    Raises:
        ClusterError: a rank died or did not answer in time.
    """
    rows = (*places(asked, timeout_s), *teacher)
    pools = tuple(pool.need for pool in asked)
    gpus = tuple(sorted(cluster.gpus))
    return GpuMap(
        device=device,
        pools=pools,
        rows=rows,
        verdicts=(*judge(rows, pools, gpus=gpus), *found),
        notes=tuple(scattered(rows, gpus)),
        gpus=gpus,
        order=tuple(cluster.order),
    )


def scattered(rows: Sequence[RankPlace], gpus: Sequence[int]) -> Iterator[str]:
    """Ranks whose GPUs have others between them: Ray gives out the lowest free ones, wherever they are."""
    for row in rows:
        ids = [int(gpu) for gpu in row.ray_gpu_ids or () if gpu.isdecimal()]
        between = [gpu for gpu in gpus or range(max(ids, default=0) + 1) if ids and min(ids) < gpu < max(ids)]
        if others := [gpu for gpu in between if gpu not in ids]:
            yield (
                f"{row.label} works on GPUs {','.join(map(str, ids))} and not on {','.join(map(str, others))} between "
                "them, which may slow it down: they were not free"
            )


def check_can_run(table: GpuMap) -> None:
    """Raises ClusterError: two ranks on one real GPU, which NCCL refuses or waits on for ever, or one outside of
    cluster.gpus, where the teacher may be.
    """
    kinds = ("outside_gpus", "shared_gpu") if table.device == "cuda" else ("outside_gpus",)
    fatal = [str(verdict) for verdict in table.verdicts if verdict.kind in kinds]
    if fatal:
        raise ClusterError(" ".join(fatal))
