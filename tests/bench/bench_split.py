"""Compare the step times that `gkd split` estimates from one run of each scheduler with those of runs on other splits.

    python -m tests.bench.bench_split --json docs/results/split_cpu.json

The loop, schedulers, Ray's actors, streams, endpoints and weight sync are the product's own. A stage holds for the time
that its tokens would take (`tests.bench.timed_roles`), so slots of processes need no GPU. The teacher has slots of its
own. About 10 minutes.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from contextlib import closing
from pathlib import Path

import numpy as np
import ray

from gkd.actor.pool import ActorPool
from gkd.cluster.calls import gather
from gkd.cluster.cluster import HELPER_CPUS, Cluster, PoolSpec
from gkd.config.load import load_config
from gkd.config.schema import Config
from gkd.rollout.driver.pool import RolloutPool
from gkd.rollout.driver.weight_sync import WeightSync
from gkd.rollout.engine import worker as rollout_worker
from gkd.run.open import open_run_folder
from gkd.scoring.pool import RECORDS, ScoringPool
from gkd.scoring.teacher.window import Window
from gkd.start.pools import worker_env
from gkd.tools.report.read import read_runs
from gkd.tools.split import Measured, Split, measure, steps_of
from gkd.trainer import Roles, Trainer
from gkd.types import Prompt
from tests.bench.bench_pipeline import ClockEndpoint
from tests.bench.teacher_report import machine
from tests.bench.timed_roles import SAVES, Meeting, Rates, Stages, TimedActorWorker, TimedRolloutWorker

SPLITS = ((1, 2), (1, 1), (1, 3), (1, 4), (2, 1), (2, 2))  # ranks, engines; the first is the run that is read
SCHEDULERS = ("sync", "one_step_off", "stream")
BATCH, MAX_RUNNING, PROMPT, N_STEPS = 96, 8, 12, 14
RATES = Rates(0.004, 0.0005, 0.0, score_token_s=0.00005, train_s=0.0, train_token_s=0.0002, sync_s=0.02)
STAGES = Stages(RATES, mean_tokens=24.0, sigma=0.6)


class Slots:
    """The processes of the largest split, started once; a run uses some of them."""

    def __init__(self) -> None:
        n_ranks, n_engines = (max(column) for column in zip(*SPLITS, strict=True))
        self.cluster, env = Cluster("", n_slots=n_ranks + n_engines, on_cpu=True), worker_env(True)
        specs = [PoolSpec("actor", 1, n_ranks, 1), PoolSpec("rollout", 1, n_engines, 1)]
        pools, groups = self.cluster.make_pools(specs, 60.0), rollout_worker.CONCURRENCY_GROUPS
        self._ranks = pools["actor"].spawn(TimedActorWorker, env, concurrency_groups=(SAVES,))
        self._engines = pools["rollout"].spawn(TimedRolloutWorker, env, concurrency_groups=groups)
        options = {"num_cpus": HELPER_CPUS, "max_concurrency": 8, "runtime_env": {"env_vars": env}}
        made = ray.remote(concurrency_groups={RECORDS: 1})(ClockEndpoint).options(**options)
        config = load_config(None, ["trainer.device=cpu"])
        self._endpoints = [made.remote(config, 0, [""], [Window(64)]) for _ in self._ranks]

    def run(self, config: Config) -> None:
        n_ranks, n_engines = config.derived.dp_size, config.derived.n_engines
        ranks, engines, endpoints = self._ranks[:n_ranks], self._engines[:n_engines], self._endpoints[:n_ranks]
        meeting = ray.remote(Meeting).options(num_cpus=0).remote(n_engines)
        calls = {f"rank {i}": rank.prepare.remote(STAGES) for i, rank in enumerate(ranks)}
        calls |= {f"engine {i}": one.prepare.remote(config, STAGES, meeting) for i, one in enumerate(engines)}
        calls |= {f"endpoint {i}": one.prepare.remote(RATES.score_token_s) for i, one in enumerate(endpoints)}
        gather(calls, "prepare", 240.0)
        actor = ActorPool(ranks, config)
        sync = WeightSync(actor.exporters(), engines, config, "cpu", timeout_s=60.0)
        roles = Roles(actor, RolloutPool(engines, config, n_ranks), ScoringPool(endpoints, 120.0), sync)
        prompts = [Prompt(i, np.ones(PROMPT, np.int32)) for i in range(BATCH * N_STEPS)]
        folder = open_run_folder(config, {"name": "timed", "fingerprint": "none"})
        Trainer(config, roles, prompts, [], folder, N_STEPS).fit()


def measured(slots: Slots, folder: Path, scheduler: str, n_ranks: int, n_engines: int) -> Measured:
    """Make a run and return its mean step, as `gkd split` reads it."""
    names = "data.train_files=[none] model.path=none eval.metric=none trainer.device=cpu weight_sync.verify=never"
    sizes = f"trainer.n_gpus_per_node={n_ranks} rollout.n_gpus_per_node={n_engines} trainer.total_steps={N_STEPS}"
    limits = f"rollout.max_num_seqs={MAX_RUNNING} data.max_response_length=90 trainer.global_batch_size={BATCH}"
    settings = f"{names} {sizes} {limits} trainer.run_dir={folder} trainer.scheduler={scheduler}"
    config = load_config(None, settings.split())
    slots.run(config)
    (found,) = read_runs([folder])
    return measure(found, config, steps_of(found, config), elsewhere=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="F", required=True, help="write the figures here")
    args = parser.parse_args()
    rows, slots = list[str](), Slots()
    with closing(slots.cluster), tempfile.TemporaryDirectory(prefix="bench_split.") as root:
        for scheduler in SCHEDULERS:
            runs = {(s, r): measured(slots, Path(root, f"{scheduler}_{s}_{r}"), scheduler, s, r) for s, r in SPLITS}
            for (student, rollout), one in runs.items():
                estimated_s = runs[SPLITS[0]].on(Split(rollout, 0, student)).step_s
                row = {"scheduler": scheduler, "student": student, "rollout": rollout, "measured_s": one.step_s}
                rows.append(json.dumps(row | {"estimated_s": estimated_s, "off": estimated_s / one.step_s - 1}))
                print(rows[-1], flush=True)
    runs_text = ",\n  ".join(rows)
    args.json.write_text(f'{{\n "machine": {json.dumps(machine())},\n "runs": [\n  {runs_text}\n ]\n}}\n')


if __name__ == "__main__":
    main()
