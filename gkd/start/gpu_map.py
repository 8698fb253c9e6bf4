"""Collect the placement of every rank and make the GPU map, for training and for `check_gpus`.

Training keeps the map in its run folder: it is written at the start, when an engine is restarted, and at the end.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from typing import Any

from msgspec import structs

from gkd.cluster.calls import gather
from gkd.cluster.gpu_table import GpuMap, RankPlacement, find_problems, gpu_map_from_json
from gkd.cluster.startup import sort_visible_gpus, this_placement
from gkd.config.schema import Config
from gkd.errors import ClusterError
from gkd.log import get_logger
from gkd.run.folder import PLACES, RunFolder
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


def make_gpu_map(config: Config, device: str, calls: Mapping[str, Any], timeout_s: float) -> GpuMap:
    """Wait for the placements, and make the GPU map with its problems. Raises ClusterError: a rank did not reply.

    Args:
        device: of the ranks, "cpu" or "cuda".
        calls: a pending RankPlacement of each rank, by its name.
    """
    teacher, silent = teacher_rows(config.derived.routes)
    rows = (*gather(calls, "GPU placement", timeout_s).values(), *teacher)
    gpus = tuple(sorted(config.cluster.gpus))
    findings = find_problems(rows, gpus, with_teacher=config.cluster.teacher_gpu_share > 0)
    return GpuMap(device=device, rows=rows, findings=(*findings, *silent), gpus=gpus)


def record_placement(
    config: Config, device: str, folder: RunFolder, calls: Mapping[str, Any], timeout_s: float
) -> GpuMap:
    """Log the table of ranks and GPUs, write it to the run folder, and return it.

    Raises ClusterError: two ranks share a real GPU, or a rank is outside of its GPUs or died; CheckpointError.
    """
    table = make_gpu_map(config, device, calls, timeout_s)
    folder.write(PLACES, table.to_json())
    log.log(logging.WARNING if table.findings else logging.INFO, "GPU placement:\n%s", table.text())
    fatal = ["outside_gpus"]
    if device == "cuda":  # NCCL hangs if two ranks share a GPU
        fatal.append("shared_gpu")
    if problems := [str(finding) for finding in table.findings if finding.kind in fatal]:
        raise ClusterError(" ".join(problems))
    return table


def record_restart(folder: RunFolder, row: RankPlacement) -> None:
    """Put a restarted rank in the place of the process before it. Raises CheckpointError."""
    with _CHANGING:
        table = gpu_map_from_json(folder.read_places(), str(folder.root))
        rows = tuple(row if (old.pool, old.rank) == (row.pool, row.rank) else old for old in table.rows)
        folder.write(PLACES, structs.replace(table, rows=rows).to_json())


def record_end(folder: RunFolder, stopped: str = "") -> None:
    """Note that the run has reached its end, or why it stopped before. Raises CheckpointError."""
    with _CHANGING:
        table = gpu_map_from_json(folder.read_places(), str(folder.root))
        folder.write(PLACES, structs.replace(table, ended=not stopped, stopped=stopped).to_json())
