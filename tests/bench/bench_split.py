"""Compare the split tuner's estimates, made from the metrics of one run, with the measured step times of all splits.

    python -m tests.bench.bench_split [--json docs/results/split_cpu.json] [--steps 14] [--calibrate-from stream]

The loop, the schedulers and the Ray actors are real, in pools of eight logical GPUs. Each stage sleeps for the time
that its number of tokens would take (`tests.bench.timed_roles`). The tuner reads one run folder, as for a user, and
never the configured times.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray

from gkd.actor.pool import ActorPool
from gkd.cluster.calls import gather
from gkd.cluster.cluster import HELPER_CPUS, Cluster, PoolSpec
from gkd.config.load import load_config
from gkd.config.schema import Config
from gkd.config.schema_trainer import TrainerConfig
from gkd.log import get_logger
from gkd.metrics.writer import read_metrics
from gkd.rollout.driver.pool import RolloutPool
from gkd.rollout.driver.weight_sync import WeightSync
from gkd.rollout.engine import worker as rollout_worker
from gkd.run.open import open_run_folder
from gkd.scoring.pool import RECORDS, ScoringPool
from gkd.scoring.teacher.window import Window
from gkd.start.pools import worker_env
from gkd.tools.split_tuner.rates import WARM_UP, read_run
from gkd.tools.split_tuner.splits import Rates, Sizes, estimate
from gkd.trainer import Roles, Trainer
from gkd.types import Prompt
from tests.bench.timed_roles import (
    SAVES,
    Meeting,
    Stages,
    TimedActorWorker,
    TimedEndpoint,
    TimedRolloutWorker,
    TimedTeacher,
)

log = get_logger("bench_split")
# (actor, rollout, teacher) of eight slots.
SPLITS = ((3, 3, 2), (1, 6, 1), (2, 4, 2), (4, 3, 1), (1, 4, 3), (5, 2, 1), (2, 2, 4))
# Whose metrics the tuner sees. Under stream it is a run that waits for its teacher, whose questions then queue.
CALIBRATED = {"sync": (3, 3, 2), "stream": (4, 3, 1)}
SCHEDULERS = ("sync", "one_step_off", "two_step_off", "stream")
STAGES = Stages(
    Rates(
        pass_s=0.020,
        sequence_s=0.0010,
        prefill_s=0.00005,
        hand_over_s=0.0,
        batch_s=0.0,
        score_s=0.010,
        score_token_s=0.0007,
        train_s=0.10,
        train_token_s=0.0009,
        sync_s=0.05,
        other_s=0.0,
    ),
    mean_tokens=24.0,
    sigma=0.6,
)
GOAL, GOAL_BEST = 0.20, 0.05  # error of a step time; how much slower a recommended split is than the fastest one


class Slots:
    """Eight slots at most at a time, of processes that are started once."""

    def __init__(self) -> None:
        n_actor, n_rollout = max(s[0] for s in SPLITS), max(s[1] for s in SPLITS)
        self._cluster = Cluster("", n_slots=n_actor + n_rollout, on_cpu=True)
        self._env = worker_env(True)
        pools = self._cluster.make_pools([PoolSpec("actor", 1, n_actor, 1), PoolSpec("rollout", 1, n_rollout, 1)], 60.0)
        self._actors = pools["actor"].spawn(TimedActorWorker, self._env, concurrency_groups=(SAVES,))
        self._engines = pools["rollout"].spawn(
            TimedRolloutWorker, self._env, concurrency_groups=rollout_worker.CONCURRENCY_GROUPS
        )
        self._endpoints: list[Any] = []

    def roles(self, config: Config, sizes: Sizes) -> Roles:
        actors, engines = self._actors[: sizes.dp], self._engines[: sizes.engines]
        meeting = ray.remote(Meeting).options(num_cpus=0).remote(sizes.engines)
        teacher = ray.remote(TimedTeacher).options(num_cpus=0, max_concurrency=sizes.workers).remote(STAGES.rates)
        while len(self._endpoints) < sizes.dp:
            made = ray.remote(concurrency_groups={RECORDS: 1})(TimedEndpoint)
            options = {"num_cpus": HELPER_CPUS, "max_concurrency": 8, "runtime_env": {"env_vars": self._env}}
            self._endpoints.append(made.options(**options).remote(config, 0, [""], [Window(8)]))
        endpoints = self._endpoints[: sizes.dp]
        refs = {f"actor {i}": a.prepare.remote(STAGES) for i, a in enumerate(actors)}
        refs |= {f"engine {i}": e.prepare.remote(config, STAGES, meeting) for i, e in enumerate(engines)}
        refs |= {f"endpoint {i}": e.ask.remote(teacher) for i, e in enumerate(endpoints)}
        gather(refs, "prepare", 240.0)
        actor = ActorPool(actors, config)
        return Roles(
            actor=actor,
            rollout=RolloutPool(engines, config, sizes.dp),
            scoring=ScoringPool(endpoints, 120.0),
            weight_sync=WeightSync(actor.exporters(), engines, config, "cpu", timeout_s=60.0),
        )

    def close(self) -> None:
        self._cluster.close()


def run(slots: Slots, split: tuple[int, int, int], scheduler: str, n_steps: int, folder: Path) -> None:
    """One training."""
    sizes = Sizes(*split)
    settings = {
        "data.train_files": "[none]",
        "data.max_response_length": 90,
        "model.path": "none",
        "eval.metric": "none",
        "trainer.device": "cpu",
        "trainer.run_dir": folder,
        "trainer.scheduler": scheduler,
        "trainer.global_batch_size": 32,
        "trainer.n_gpus_per_node": sizes.dp,
        "rollout.n_gpus_per_node": sizes.engines,
        "rollout.max_num_seqs": 16,
        "weight_sync.verify": "never",
        "trainer.total_steps": n_steps,
    }
    config = load_config(None, [f"{key}={value}" for key, value in settings.items()])
    prompts = [Prompt(i, np.ones(12, np.int32)) for i in range(32 * n_steps)]
    opened = open_run_folder(config, {"name": "timed", "fingerprint": "none"})
    Trainer(config, slots.roles(config, sizes), prompts, [], opened, n_steps).fit()


def measured_step_s(folder: Path) -> tuple[float, float]:
    """Mean and standard error of it; without the first steps, and those at the end whose rollouts were made before.

    A stream's steps are long and short by turns: those of a staleness bound share what they wait for. So pairs count.
    """
    steps = [line["time/step_s"] for line in read_metrics(folder / "metrics.jsonl") if "loss/total" in line]
    steps = steps[WARM_UP:-2]
    times = np.array(steps[len(steps) % 2 :]).reshape(-1, 2).mean(1)
    return float(times.mean()), float(times.std(ddof=1) / np.sqrt(len(times)))


def measure(
    n_steps: int, root: Path, calibrated: tuple[tuple[int, int, int], str], schedulers: Sequence[str]
) -> list[dict[str, Any]]:
    rows, seen = [], None
    order = sorted(((s, k) for k in schedulers for s in SPLITS), key=lambda case: case != calibrated)
    slots = Slots()
    try:
        for split, scheduler in order:
            began = time.monotonic()
            folder = root / f"{scheduler}_{'_'.join(map(str, split))}"
            if not (folder / "export").exists():
                run(slots, split, scheduler, n_steps, folder)
            if seen is None:
                seen = read_run([folder], workers=split[2])
                log.info("calibrated: %s %s", seen.rates, seen.notes)
            mean_s, error_s = measured_step_s(folder)
            bound = TrainerConfig(scheduler=scheduler).staleness_bound
            estimated_s = estimate(scheduler, bound, Sizes(*split), seen.workload, seen.rates).step_s
            rows.append(
                {"split": split, "scheduler": scheduler, "measured_s": mean_s, "standard_error_s": error_s}
                | {"estimated_s": estimated_s, "off": estimated_s / mean_s - 1}
            )
            log.info("%s (%.0f s)", line(rows[-1]), time.monotonic() - began)
    finally:
        slots.close()
    return rows


def line(row: dict[str, Any]) -> str:
    actor, rollout, teacher = row["split"]
    return (
        f"{row['scheduler']:13} actor {actor} rollout {rollout} teacher {teacher}  measured {row['measured_s']:.3f} s "
        f"(+- {row['standard_error_s']:.3f})  estimated {row['estimated_s']:.3f} s  {row['off']:+.1%}"
    )


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the errors of the estimates, and what following the recommendation costs: over all, and by scheduler."""
    best: dict[str, float] = {}
    off: dict[str, tuple[float, float]] = {}
    for name in ("all", *dict.fromkeys(row["scheduler"] for row in rows)):
        some = [row for row in rows if name in ("all", row["scheduler"])]
        recommended = min(some, key=lambda row: row["estimated_s"])
        best[name] = recommended["measured_s"] / min(row["measured_s"] for row in some) - 1
        off[name] = min(row["off"] for row in some), max(row["off"] for row in some)
    errors = [abs(row["off"]) for row in rows]
    return {
        "worst_off": max(errors),
        "mean_off": float(np.mean(errors)),
        "off_from_to": off,
        "recommended_slower_than_best": best,
        "met": max(errors) <= GOAL and max(best.values()) <= GOAL_BEST,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="F", help="write the figures here, too")
    parser.add_argument("--steps", type=int, default=14, help="of each run; default: %(default)s")
    parser.add_argument(
        "--calibrate-from", choices=sorted(CALIBRATED), default="sync", help="scheduler of the run that is read"
    )
    parser.add_argument(
        "--schedulers", type=lambda text: text.split(","), default=SCHEDULERS, metavar="A,B", help="default: all four"
    )
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the runs here, and take those that are there")
    args = parser.parse_args()
    calibrated = CALIBRATED[args.calibrate_from], args.calibrate_from
    with tempfile.TemporaryDirectory(prefix="bench_split.") as root:
        rows = measure(args.steps, args.keep or Path(root), calibrated, args.schedulers)
    result = {"slots": 8, "steps": args.steps, "calibrated_on": calibrated, "runs": rows}
    result |= summary(rows)
    print("\n".join(line(row) for row in rows))
    print(json.dumps(summary(rows), indent=1))
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if result["met"] else 1


if __name__ == "__main__":
    sys.exit(main())
