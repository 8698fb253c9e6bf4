"""Keep the GPU map of a run in its folder: at the start, when an engine is restarted, and at the end."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

from msgspec import structs

from gkd.cluster.gpu_table import GpuMap, RankPlacement, gpu_map_from_json
from gkd.config.schema import Config
from gkd.gpu_map import collect
from gkd.gpu_map.report import gpu_report
from gkd.gpu_map.teacher import teacher_rows
from gkd.log import get_logger
from gkd.run.folder import RunFolder

log = get_logger("launcher")
_CHANGING = threading.Lock()  # engines are restarted in threads, which the end of a run does not wait for


def record_placement(
    config: Config, device: str, folder: RunFolder, calls: Sequence[collect.PlacementCalls], timeout_s: float
) -> GpuMap:
    """Log the table of ranks and GPUs, write it to the run folder, and return it.

    Raises ClusterError, as `collect.check_can_run`; CheckpointError: the run folder cannot be written.
    """
    teacher, found = teacher_rows(config.derived.routes, device)
    table = collect.make_gpu_map(device, calls, teacher, timeout_s=timeout_s, found=found, cluster=config.cluster)
    folder.write_places(table.to_json())
    log.log(logging.WARNING if table.findings else logging.INFO, "GPU placement:\n%s", gpu_report(table))
    collect.check_can_run(table)
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
