"""Report which rank is on which GPU: `gkd check-gpus --config X.yaml | --running RUN_DIR`.

`--config` builds the pools as training would. No model is loaded and no CUDA context is created: each rank only reports
its placement. `--running` compares gpus.json of a running job with this machine's processes and driver, without calls
to Ray. CUDA_VISIBLE_DEVICES stays as the rank reported it: /proc/PID/environ does not show what Ray sets in a process.
"""

from __future__ import annotations

import argparse
import socket
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from msgspec import structs

from gkd.cluster.gpu_table import TEACHER, Finding, GpuInfo, GpuMap, RankPlacement, find_problems, gpu_map_from_json
from gkd.cluster.gpus import machine_gpus, visible_gpus
from gkd.cluster.host import nearest_ancestor, process_info
from gkd.config.check import check_config
from gkd.config.load import add_config, load_config, parse_overrides
from gkd.config.schema import Config
from gkd.console.terminal import LINES, Terminal
from gkd.errors import ClusterError, ConfigError
from gkd.spans import driver
from gkd.tools import exit_codes
from teacher_server.config.command import command_parser

_POOL_S = 60.0  # less than trainer.init_timeout_s, which training waits: GPUs that are free are granted at once
_EXAMPLES = """examples:
  gkd check-gpus --config mine.yaml teacher.server_ip=10.0.0.5 --json | jq '.findings[].kind'
  gkd check-gpus --running runs/mine

exit code: 0 no problems found; 1 problems (each line that begins with WRONG has a problem and its fix; an unreachable
teacher is one of them), or no pools, or a rank of the run has ended; 2 invalid settings, or no gpus.json
"""


@exit_codes(ConfigError)
def main(argv: list[str] | None = None) -> int:
    """Run the command line and return the exit code, see `_EXAMPLES`."""
    args = _parse(argv)
    with Terminal(LINES, ""):  # tells every 5 s what it does
        table = check_running(Path(args.running)) if args.running else check(load_config(args.config, args.overrides))
    print(table.to_json().decode() if args.json else table.text(), flush=True)
    return 1 if table.findings else 0


def check(config: Config) -> GpuMap:
    """Build the pools that training would use, map their GPUs, and free them.

    Raises ConfigError: a setting is invalid, or GPUs are missing; ClusterError: Ray does not start, or has too few.
    """
    check_config(config)
    with driver.doing("importing torch and Ray"):
        # Imported here: an invalid setting is reported before torch is imported.
        from gkd.preflight.machine import resolve_device
        from gkd.preflight.settings import check_ray_installed

        check_ray_installed()
        from gkd.scoring.teacher.gpus import teacher_rows, with_own_gpus
        from gkd.start.gpu_map import PlacementProbe, make_gpu_map
        from gkd.start.pools import make_cluster, make_pools, worker_env

        device = resolve_device(config)
    with driver.doing("asking the teacher for its GPUs"):
        config = with_own_gpus(config, device, teacher_rows(config.derived.routes)[0])
    on_cpu = device == "cpu"
    with driver.doing("starting Ray"):
        cluster = make_cluster(config, on_cpu=on_cpu)
    with closing(cluster), driver.doing("reserving the pools"):
        calls: dict[str, Any] = {}
        for name, pool in make_pools(cluster, config, min(_POOL_S, config.trainer.init_timeout_s)).items():
            workers = pool.named(pool.spawn(PlacementProbe, worker_env(on_cpu)))
            calls |= {rank: worker.placement.remote(name, not on_cpu) for rank, worker in workers.items()}
        return make_gpu_map(config, device, calls, config.trainer.init_timeout_s)


def check_running(run_dir: Path) -> GpuMap:
    """Return the current GPU map of a running job without disturbing its ranks.

    Raises ConfigError: gpus.json or the run's settings cannot be read; ClusterError: a rank has ended.
    """
    from gkd.run.folder import PLACES
    from gkd.scoring.teacher.gpus import teacher_rows

    try:
        saved = gpu_map_from_json((run_dir / PLACES).read_bytes(), str(run_dir / PLACES))
    except OSError as error:
        problem = f"cannot read {PLACES} ({error.strerror}): no training has started in this folder."
        raise ConfigError("--running", str(run_dir), problem, "name the run_dir of a running job.") from error
    if saved.ended:
        return structs.replace(saved, note="the run has reached its end; the table is that of its start")
    config = load_config(run_dir / "config.yaml")
    teacher, silent = teacher_rows(config.derived.routes)
    ranks, outside = refresh(saved, socket.gethostname(), machine_gpus() if saved.device == "cuda" else [])
    problems = find_problems([*ranks, *teacher], saved.gpus, with_teacher=config.cluster.teacher_gpu_share > 0)
    elsewhere = ", ".join(sorted({row.host for row in ranks} - {socket.gethostname()}))
    note = f"ranks on {elsewhere} are shown as of the start; run this command there, too" if elsewhere else ""
    return structs.replace(saved, rows=(*ranks, *teacher), findings=(*problems, *outside, *silent), note=note)


def refresh(saved: GpuMap, host: str, machine: Sequence[GpuInfo]) -> tuple[list[RankPlacement], list[Finding]]:
    """Return the ranks with the current state of this machine's GPUs, and those that compute on others.

    Raises ClusterError: a rank on this machine has ended, by /proc.

    Args:
        host: name of this machine, as in the rows. Rows of other hosts are not changed.
        machine: its GPUs with their current processes; empty if there is no GPU, or they are unknown.
    """
    here = {row.pid: row for row in saved.rows if row.pool != TEACHER and row.host == host}
    started = {pid: getattr(process_info(pid), "started", None) for pid in here}
    if gone := [f"{row.label} (process {pid})" for pid, row in here.items() if started[pid] != row.started]:
        fix = "see the log of the run for the reason; resume it with trainer.resume=auto."
        raise ClusterError(f"these ranks on {host} have ended: {', '.join(gone)}. Fix: {fix}")
    findings = []
    owners = [(gpu, pid, nearest_ancestor(pid, here)) for gpu in machine for pid in gpu.pids]
    for gpu, pid, row in [(gpu, pid, here[root]) for gpu, pid, root in owners if root is not None]:
        # The driver lists the processes of a slice (MIG) under the whole GPU.
        if not any(used.uuid == gpu.uuid or used.id.startswith("MIG-") for used in row.used_gpus):
            names = ", ".join(f"{used.id} ({used.uuid})" for used in row.used_gpus) or "none"
            problem = f"{row.label} (process {pid}) computes on GPU {gpu.id} ({gpu.uuid}); its own: {names}."
            fix = "start the run again, without code that calls torch.cuda.set_device before the rank does."
            findings.append(Finding(kind="outside_gpus", ranks=(row.label,), problem=problem, fix=fix))
    now = {pid: visible_gpus(row.cuda_visible_devices, machine) if machine else row.gpus for pid, row in here.items()}
    ranks = [row for row in saved.rows if row.pool != TEACHER]
    return [structs.replace(row, gpus=now[row.pid]) if row.host == host else row for row in ranks], findings


def _parse(argv: list[str] | None) -> argparse.Namespace:
    about = "Report which rank is, or would be, on which GPU, and find problems of the placement."
    parser = command_parser("gkd check-gpus", about, _EXAMPLES)
    which = parser.add_mutually_exclusive_group(required=True)
    add_config(which, "settings of a training run to be started", required=False)
    which.add_argument("--running", metavar="RUN_DIR", help="run folder of a running job")
    parser.add_argument("--json", action="store_true", help="print one JSON object, as in gpus.json of a run")
    args = parse_overrides(parser, argv)
    if args.running and args.overrides:
        parser.error("--running uses the settings of the run and accepts no key=value")
    return args


if __name__ == "__main__":
    sys.exit(main())
