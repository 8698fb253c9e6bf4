"""Refresh the GPU map of a running job from this machine's /proc and driver, without calls to Ray.

Refreshed are the live processes and the GPUs they compute on. CUDA_VISIBLE_DEVICES stays as the rank reported it: Ray
sets it inside the process, and /proc/PID/environ shows only the environment at the start.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from msgspec import structs

from gkd.cluster.gpu_table import RUN_ENDED, TEACHER, Finding, GpuInfo, GpuMap, RankPlacement
from gkd.cluster.host import nearest_ancestor, process_info
from gkd.gpu_map.findings import find_problems, used_gpus


def refresh(saved: GpuMap, host: str, machine: Sequence[GpuInfo], teacher: Sequence[RankPlacement]) -> GpuMap:
    """Return the saved map with the current state of this machine. Reads /proc.

    Args:
        host: name of this machine, as in the rows. Rows of other hosts are not changed; a note names them.
        machine: its GPUs with their current processes; empty if there is no GPU, or they are unknown.
        teacher: current rows of the teacher workers.
    """
    ranks = [row for row in saved.rows if row.pool != TEACHER]
    here = [row for row in ranks if row.host == host]
    gone = [row for row in here if not _is_alive(row)]
    owners = {row.pid: row for row in (*here, *(row for row in teacher if row.host == host)) if row not in gone}
    now = {gpu.uuid: _other_processes_only(gpu, owners) for gpu in machine if gpu.uuid}
    rows = [_refreshed(row, now) if row.host == host else row for row in ranks]
    rows += [_refreshed(row, now) if row.host == host else row for row in teacher]
    findings = [
        Finding(
            kind="process_gone",
            ranks=(row.label,),
            problem=f"{row.label}, process {row.pid} on {host}, has ended.",
            fix="see the log of the job for the reason; resume with trainer.resume=auto.",
        )
        for row in gone
    ]
    findings += _on_other_gpus(saved, machine, owners)
    elsewhere = Counter(row.host for row in ranks if row.host != host)
    notes = tuple(
        f"{count} ranks on {other} are shown as of the start; run this command there to refresh them"
        for other, count in elsewhere.items()
    )
    share = saved.teacher_gpu_share
    findings += find_problems(rows, saved.pools, loaded=True, gpus=saved.gpus, teacher_gpu_share=share)
    return structs.replace(saved, rows=tuple(rows), findings=tuple(findings), notes=notes)


def ended(saved: GpuMap) -> GpuMap:
    """Return the saved map of a run that reached its end, which has no processes to look at."""
    finding = Finding(
        kind=RUN_ENDED,
        ranks=(),
        problem="training reached its end, and the ranks were stopped. The table is that of the start.",
        fix="",
    )
    return structs.replace(saved, findings=(finding,))


def _is_alive(row: RankPlacement) -> bool:
    process = process_info(row.pid)
    return process is not None and row.started in (None, process.started)


def _other_processes_only(gpu: GpuInfo, owners: Mapping[int, RankPlacement]) -> GpuInfo:
    """Drop the ranks, their children, and processes that are not visible here (in another container)."""
    return replace(
        gpu,
        pids=tuple(pid for pid in gpu.pids if process_info(pid) is not None and nearest_ancestor(pid, owners) is None),
    )


def _refreshed(row: RankPlacement, now: Mapping[str, GpuInfo]) -> RankPlacement:
    gpus = (
        replace(now[gpu.uuid], id=gpu.id) if gpu.uuid and gpu.uuid in now else replace(gpu, pids=()) for gpu in row.gpus
    )
    return structs.replace(row, gpus=tuple(gpus))


def _on_other_gpus(saved: GpuMap, machine: Sequence[GpuInfo], owners: Mapping[int, RankPlacement]) -> list[Finding]:
    """Find ranks that compute on a GPU that they were not assigned: NCCL or CUDA was initialized on the wrong one."""
    needs = {pool.name: pool for pool in saved.pools}
    found = []
    for gpu in machine:
        for pid in gpu.pids:
            root = nearest_ancestor(pid, owners)
            row = owners[root] if root is not None else None
            if row is None or row.pool not in needs:
                continue
            own = used_gpus(row, needs)
            in_parts = any((other.uuid or "").startswith("MIG-") for other in own)  # the driver lists the whole GPU
            if not in_parts and gpu.uuid not in {other.uuid for other in own}:
                found.append(
                    Finding(
                        kind="wrong_gpu",
                        ranks=(row.label,),
                        problem=f"{row.label} (process {pid}) computes on GPU {gpu.id} ({gpu.uuid}), but was assigned "
                        f"{', '.join(f'{other.id} ({other.uuid})' for other in own) or 'none'}.",
                        fix="restart the job with the CUDA_VISIBLE_DEVICES that Ray sets, and without code that calls "
                        "torch.cuda.set_device before the rank does.",
                    )
                )
    return found
