"""`python -m gkd.tools.check_gpus --config X.yaml`: build the pools as training would, and show who sits on which GPU.

Nothing is loaded and no CUDA context is made: each rank says where it sits and leaves. With `--running RUN_DIR` a job
that runs is looked at, from its own table and this machine's processes, without asking Ray for anything.
"""

from __future__ import annotations

import argparse
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from gkd.cluster.gpu_table import Finding, GpuMap, survey_of
from gkd.config.check import check_config
from gkd.config.load import load_config, parse_overrides
from gkd.config.schema import Config
from gkd.errors import ClusterError, ConfigError, GkdError

if TYPE_CHECKING:
    from gkd.cluster.placement import PoolSpec
    from gkd.cluster.pools import Cluster, Pool

# Free GPUs come at once or not soon; training waits for trainer.init_timeout_s.
_POOL_S = 60.0
_EXAMPLES = """examples:
  python -m gkd.tools.check_gpus --config configs/quickstart_cpu.yaml trainer.run_dir=runs/none
  python -m gkd.tools.check_gpus --config mine.yaml teacher.server_ip=10.0.0.5 --json | jq '.verdicts[].kind'
  python -m gkd.tools.check_gpus --running runs/mine

exit code: 0 nothing is wrong, 1 something is (each line that begins with WRONG says what, and the fix; a teacher that
does not answer is one of them), 2 wrong settings, or a run folder without gpus.json
"""


def main(argv: list[str] | None = None) -> int:
    """Exit code, see `_EXAMPLES`."""
    args = _parse(argv)
    try:
        table = look_at_run(Path(args.running)) if args.running else check(load_config(args.config, args.overrides))
    except ConfigError as error:
        print(f"config error: {error}", file=sys.stderr)
        return 2
    except GkdError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    from gkd.gpu_map.report import place_table

    print(table.to_json().decode() if args.json else place_table(table), flush=True)
    return 1 if table.verdicts else 0


def check(config: Config) -> GpuMap:
    """The table of the pools that training would have; takes and frees their GPUs.

    Raises:
        ConfigError: a setting is wrong.
        ClusterError: there is no Ray, or it cannot be started or joined, or a rank died or did not answer.
    """
    check_config(config)
    # Here and not above: a wrong setting should not wait for torch.
    from gkd.preflight.device import resolve_device
    from gkd.preflight.run import check_ray_installed

    check_ray_installed()
    from gkd.gpu_map import collect as survey
    from gkd.gpu_map.teacher import teacher_rows
    from gkd.launcher import ROLLOUT, make_cluster, make_pools, pools_in_order, shares_with, worker_env

    specs = pools_in_order(config)
    tp_sizes = {"actor": config.actor.tp, "rollout": 1}  # ranks of one TP group; an engine is one rank
    try:
        device = resolve_device(config)
    except ConfigError as error:
        if error.key != "rollout.n_gpus_per_node":
            raise
        # Too few GPUs to start Ray for: there are no ranks to ask, but the teacher may sit on what is missing.
        teacher, found = teacher_rows(config.teacher, "cuda")
        return GpuMap(device="cuda", pools=(), rows=tuple(teacher), verdicts=(_too_few(error), *found))
    teacher, found = teacher_rows(config.teacher, device)
    on_cpu = device == "cpu"
    cluster = make_cluster(config, on_cpu=on_cpu)
    asked, too_few = [], []
    try:
        try:
            pools = make_pools(cluster, config, min(_POOL_S, config.trainer.init_timeout_s))
        except ClusterError as error:
            too_few.append(_too_few(error))
            pools = _those_that_can_be_had(cluster, specs)
        for pool in pools.values():
            workers = pool.spawn(survey.PlaceWorker, worker_env(on_cpu))
            name = pool.spec.name
            refs = [worker.place.remote(name, not on_cpu) for worker in workers]
            asked.append(survey.Asked(pool.spec, tp_sizes[name], refs, shares_with(config) if name == ROLLOUT else ""))
        limit_s = config.trainer.init_timeout_s
        found = [*too_few, *found]
        return survey.survey(device, asked, teacher, timeout_s=limit_s, found=found, cluster=config.cluster)
    finally:
        cluster.close()


def look_at_run(run_dir: Path) -> GpuMap:
    """The table of a job that runs, as it is now; its ranks are not disturbed.

    Raises:
        ConfigError: there is no such table, or the run's settings cannot be read.
        ClusterError: the table is damaged.
    """
    from gkd.cluster.gpus import machine_cards
    from gkd.gpu_map.running import look_again
    from gkd.gpu_map.teacher import teacher_rows
    from gkd.run.folder import PLACES

    try:
        saved = survey_of((run_dir / PLACES).read_bytes(), str(run_dir / PLACES))
    except OSError as error:
        problem = f"it has no {PLACES} that can be read ({error.strerror}): no training has come up there."
        raise ConfigError("--running", str(run_dir), problem, "name the run_dir of a job that has.") from error
    config = load_config(run_dir / "config.yaml")
    teacher, found = teacher_rows(config.teacher, saved.device)
    machine = machine_cards() if saved.device == "cuda" else []
    table = look_again(saved, socket.gethostname(), machine, teacher)
    return replace(table, verdicts=(*table.verdicts, *found))


def _those_that_can_be_had(cluster: Cluster, specs: Sequence[PoolSpec]) -> dict[str, Pool]:
    """Where not all can, those that can now, by name; who is short has been said."""
    pools: dict[str, Pool] = {}
    for spec in specs:
        with suppress(ClusterError):
            pools |= cluster.make_pools([spec], 0.0)
    return pools


def _too_few(error: GkdError) -> Finding:
    problem, _, fix = str(error).partition(" Fix: ")
    return Finding(kind="too_few_gpus", ranks=(), problem=problem, fix=fix)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m gkd.tools.check_gpus",
        description="Which rank would sit, or sits, on which GPU, and what is wrong with it.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--config", metavar="X.yaml", help="the settings of the training to be started")
    which.add_argument("--running", metavar="RUN_DIR", help="the run folder of a job that runs")
    parser.add_argument("--json", action="store_true", help="one JSON object, as gpus.json of a run")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that differ from the file")
    args = parse_overrides(parser, argv)
    if args.running and args.overrides:
        parser.error("--running takes the run's own settings, no key=value")
    return args


if __name__ == "__main__":
    sys.exit(main())
