"""Report which rank is on which GPU: `python -m gkd.tools.check_gpus --config X.yaml | --running RUN_DIR`.

`--config` builds the pools as training would. No model is loaded and no CUDA context is created: each rank only reports
its placement. `--running` inspects a running job from its gpus.json and this machine's processes, without calls to Ray.
"""

from __future__ import annotations

import argparse
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import structs

from gkd.cluster.gpu_table import Finding, GpuMap, gpu_map_from_json
from gkd.config.check import check_config
from gkd.config.load import load_config, parse_overrides
from gkd.config.schema import Config
from gkd.errors import ClusterError, ConfigError, GkdError

if TYPE_CHECKING:
    from gkd.cluster.cluster import Cluster
    from gkd.cluster.placement import PoolSpec
from gkd.cluster.pool import Pool
from teacher_server.config.command import command_parser

# Shorter than trainer.init_timeout_s, which training waits: GPUs that are free are granted at once.
_POOL_S = 60.0
_EXAMPLES = """examples:
  python -m gkd.tools.check_gpus --config configs/quickstart_cpu.yaml trainer.run_dir=runs/none
  python -m gkd.tools.check_gpus --config mine.yaml teacher.server_ip=10.0.0.5 --json | jq '.verdicts[].kind'
  python -m gkd.tools.check_gpus --running runs/mine

exit code: 0 no problems found; 1 problems (each line that begins with WRONG has a problem and its fix; an unreachable
teacher is one of them); 0 as well for a run that has ended; 2 invalid settings, or a run folder without gpus.json
"""


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return the exit code, see `_EXAMPLES`."""
    args = _parse(argv)
    try:
        table = check_running(Path(args.running)) if args.running else check(load_config(args.config, args.overrides))
    except ConfigError as error:
        print(f"config error: {error}", file=sys.stderr)
        return 2
    except GkdError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    from gkd.gpu_map.report import gpu_report

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
    from gkd.gpu_map import collect
    from gkd.gpu_map.choice import with_own_gpus
    from gkd.gpu_map.teacher import teacher_rows
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
    from gkd.gpu_map.running import ended, refresh
    from gkd.gpu_map.teacher import teacher_rows
    from gkd.run.folder import PLACES

    try:
        saved = gpu_map_from_json((run_dir / PLACES).read_bytes(), str(run_dir / PLACES))
    except OSError as error:
        problem = f"cannot read {PLACES} ({error.strerror}): no training has started in this folder."
        raise ConfigError("--running", str(run_dir), problem, "name the run_dir of a running job.") from error
    if saved.ended:
        return ended(saved)
    config = load_config(run_dir / "config.yaml")
    teacher, found = teacher_rows(config.derived.routes, saved.device)
    machine = machine_gpus() if saved.device == "cuda" else []
    table = refresh(saved, socket.gethostname(), machine, teacher)
    return structs.replace(table, findings=(*table.findings, *found))


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
