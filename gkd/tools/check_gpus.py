"""Report which rank is on which GPU: `python -m gkd.tools.check_gpus --config X.yaml | --running RUN_DIR`.

`--config` builds the pools as training would. No model is loaded and no CUDA context is created: each rank only reports
its placement. `--running` inspects a running job from its gpus.json and this machine's processes and driver, without
calls to Ray. Refreshed are the live processes and the GPUs they compute on. CUDA_VISIBLE_DEVICES stays as the rank
reported it: Ray sets it inside the process, and /proc/PID/environ shows only the environment at the start.
"""

from __future__ import annotations

import argparse
import socket
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import structs

from gkd.cluster.gpu_findings import find_problems, used_gpus
from gkd.cluster.gpu_table import (
    RUN_ENDED,
    TEACHER,
    Finding,
    GpuInfo,
    GpuMap,
    RankPlacement,
    gpu_map_from_json,
    gpu_report,
)
from gkd.cluster.host import nearest_ancestor, process_info
from gkd.config.check import check_config
from gkd.config.load import load_config, parse_overrides
from gkd.config.schema import Config
from gkd.errors import ClusterError, ConfigError, GkdError
from gkd.tools import exit_codes
from teacher_server.config.command import command_parser

if TYPE_CHECKING:
    from gkd.cluster.cluster import Cluster
    from gkd.cluster.placement import PoolSpec
    from gkd.cluster.pool import Pool

# Shorter than trainer.init_timeout_s, which training waits: GPUs that are free are granted at once.
_POOL_S = 60.0
_EXAMPLES = """examples:
  python -m gkd.tools.check_gpus --config configs/quickstart_cpu.yaml trainer.run_dir=runs/none
  python -m gkd.tools.check_gpus --config mine.yaml teacher.server_ip=10.0.0.5 --json | jq '.verdicts[].kind'
  python -m gkd.tools.check_gpus --running runs/mine

exit code: 0 no problems found; 1 problems (each line that begins with WRONG has a problem and its fix; an unreachable
teacher is one of them); 0 as well for a run that has ended; 2 invalid settings, or a run folder without gpus.json
"""


@exit_codes(ConfigError)
def main(argv: list[str] | None = None) -> int:
    """Run the command line and return the exit code, see `_EXAMPLES`."""
    args = _parse(argv)
    table = check_running(Path(args.running)) if args.running else check(load_config(args.config, args.overrides))
    print(table.to_json().decode() if args.json else gpu_report(table), flush=True)
    return 1 if table.has_problems else 0


def check(config: Config) -> GpuMap:
    """Build the pools that training would use, map their GPUs, and free them.

    Raises:
        ConfigError: a setting is invalid.
        ClusterError: Ray is not installed, cannot be started or joined, or a rank died or did not reply.
    """
    check_config(config)
    # Imported here: an invalid setting is reported before torch is imported.
    from gkd.preflight.machine import resolve_device
    from gkd.preflight.run import check_ray_installed

    check_ray_installed()
    from gkd.scoring.teacher.gpus import teacher_rows, with_own_gpus
    from gkd.start import gpu_map as collect
    from gkd.start.pools import ROLLOUT, make_cluster, make_pools, pools_in_order, shares_with, worker_env

    tp_sizes = {"actor": config.actor.tp, "rollout": 1}  # ranks of one TP group; an engine is one rank
    try:
        device = resolve_device(config)
    except ConfigError as error:
        if error.key != "rollout.n_gpus_per_node":
            raise
        # Too few GPUs to start Ray. There are no ranks, but the teacher may use the missing GPUs.
        teacher, found = teacher_rows(config.derived.routes, "cuda")
        return GpuMap(device="cuda", pools=(), rows=tuple(teacher), findings=(_too_few(error), *found))
    teacher, found = teacher_rows(config.derived.routes, device)
    try:
        config = with_own_gpus(config, device, teacher)
    except ConfigError as error:
        return GpuMap(device="cuda", pools=(), rows=tuple(teacher), findings=(_too_few(error), *found))
    on_cpu = device == "cpu"
    cluster = make_cluster(config, on_cpu=on_cpu)
    calls, too_few = [], []
    try:
        try:
            pools = make_pools(cluster, config, min(_POOL_S, config.trainer.init_timeout_s))
        except ClusterError as error:
            too_few.append(_too_few(error))
            pools = _available_pools(cluster, pools_in_order(config))
        for pool in pools.values():
            workers = pool.spawn(collect.PlacementProbe, worker_env(on_cpu))
            name = pool.spec.name
            refs = [worker.placement.remote(name, not on_cpu) for worker in workers]
            calls.append(
                collect.PlacementCalls(pool.spec, tp_sizes[name], refs, shares_with(config) if name == ROLLOUT else "")
            )
        limit_s = config.trainer.init_timeout_s
        found = [*too_few, *found]
        return collect.make_gpu_map(device, calls, teacher, timeout_s=limit_s, found=found, cluster=config.cluster)
    finally:
        cluster.close()


def check_running(run_dir: Path) -> GpuMap:
    """Return the current GPU map of a running job without disturbing its ranks.

    Raises:
        ConfigError: gpus.json or the run's settings cannot be read.
        ClusterError: gpus.json is damaged.
    """
    from gkd.cluster.gpus import machine_gpus
    from gkd.run.folder import PLACES
    from gkd.scoring.teacher.gpus import teacher_rows

    try:
        saved = gpu_map_from_json((run_dir / PLACES).read_bytes(), str(run_dir / PLACES))
    except OSError as error:
        problem = f"cannot read {PLACES} ({error.strerror}): no training has started in this folder."
        raise ConfigError("--running", str(run_dir), problem, "name the run_dir of a running job.") from error
    if saved.ended:
        problem = "training reached its end, and the ranks were stopped. The table is that of the start."
        return structs.replace(saved, findings=(Finding(kind=RUN_ENDED, ranks=(), problem=problem, fix=""),))
    config = load_config(run_dir / "config.yaml")
    teacher, found = teacher_rows(config.derived.routes, saved.device)
    machine = machine_gpus() if saved.device == "cuda" else []
    table = refresh(saved, socket.gethostname(), machine, teacher)
    return structs.replace(table, findings=(*table.findings, *found))


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
    rows = [_refreshed(row, now) if row.host == host else row for row in (*ranks, *teacher)]
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


def _on_other_gpus(saved: GpuMap, machine: Sequence[GpuInfo], owners: Mapping[int, RankPlacement]) -> Iterator[Finding]:
    """Yield ranks that compute on a GPU that they were not assigned: NCCL or CUDA was initialized on the wrong one."""
    needs = {pool.name: pool for pool in saved.pools}
    for gpu in machine:
        for pid in gpu.pids:
            root = nearest_ancestor(pid, owners)
            row = owners[root] if root is not None else None
            if row is None or row.pool not in needs:
                continue
            own = used_gpus(row, needs)
            in_parts = any((other.uuid or "").startswith("MIG-") for other in own)  # the driver lists the whole GPU
            if not in_parts and gpu.uuid not in {other.uuid for other in own}:
                yield Finding(
                    kind="wrong_gpu",
                    ranks=(row.label,),
                    problem=f"{row.label} (process {pid}) computes on GPU {gpu.id} ({gpu.uuid}), but was assigned "
                    f"{', '.join(f'{other.id} ({other.uuid})' for other in own) or 'none'}.",
                    fix="restart the job with the CUDA_VISIBLE_DEVICES that Ray sets, and without code that calls "
                    "torch.cuda.set_device before the rank does.",
                )


def _available_pools(cluster: Cluster, specs: Sequence[PoolSpec]) -> dict[str, Pool]:
    """Return the pools that can be reserved now, by name, after all together could not."""
    pools: dict[str, Pool] = {}
    for spec in specs:
        with suppress(ClusterError):
            pools |= cluster.make_pools([spec], 0.0)
    return pools


def _too_few(error: GkdError) -> Finding:
    problem, _, fix = str(error).partition(" Fix: ")
    return Finding(kind="too_few_gpus", ranks=(), problem=problem, fix=fix)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = command_parser(
        "python -m gkd.tools.check_gpus",
        "Report which rank is, or would be, on which GPU, and find problems of the placement.",
        _EXAMPLES,
    )
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--config", metavar="X.yaml", help="settings of a training run to be started")
    which.add_argument("--running", metavar="RUN_DIR", help="run folder of a running job")
    parser.add_argument("--json", action="store_true", help="print one JSON object, as in gpus.json of a run")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="override settings of the file")
    args = parse_overrides(parser, argv)
    if args.running and args.overrides:
        parser.error("--running uses the settings of the run and accepts no key=value")
    return args


if __name__ == "__main__":
    sys.exit(main())
