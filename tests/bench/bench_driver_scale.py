"""CPU and memory of the driver at scale: 1,024 ranks, 65,536 sequences a step, steps of 10 s, scheduler `stream`.

    python -m tests.bench.bench_driver_scale [--steps 1000] [--json docs/results/driver_scale.json]

The driver is real. Engines, endpoints and ranks are objects of this process on a simulated clock, so the CPU time of a
step is divided by 10 s instead of measured over 10 s; theirs is measured and not counted. Ray's own work is not in it;
its calls are counted. Half of the ranks train, the others generate. 1,000 steps take about 6 minutes.
"""

from __future__ import annotations

import logging
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from gkd.actor.pool import ActorPool
from gkd.cluster.garbage import collect_garbage_rarely
from gkd.config.load import load_config
from gkd.rollout.driver.pool import RolloutPool
from gkd.run.manifest import digest_bytes
from gkd.run.open import open_run_folder
from gkd.scoring.group_endpoint import ScoreSummary
from gkd.scoring.pool import ScoringPool
from gkd.trainer import Roles, Trainer
from gkd.types import ProcessSpans, Prompt, ScoreTimes, TrainStats
from tests.bench.command import parsed, parser, run_parts
from tests.bench.simulated_engines import MEAN_TOKENS, N_PROMPT, N_RUNNING, Clock, Engine, Handle, N, Ref, SimulatedRay
from tests.bench.teacher_report import Figure, Part, Table

N_RANKS, N_ENGINES, N_SEQUENCES, STEP_S, MAX_STALENESS = 512, 64, 65_536, 10.0, 2
_SPARE = 1.1  # engines are this much faster than training
_WARM_UP = 5
SETTINGS = {
    "data.train_files": "[none]",
    "model.path": "none",
    "eval.metric": "none",
    "actor.tp": 8,
    "actor.pp": 4,
    "trainer.device": "cpu",
    "trainer.n_gpus_per_node": N_RANKS,
    "rollout.n_gpus_per_node": N_ENGINES,
    "trainer.scheduler": "stream",
    "trainer.max_staleness": MAX_STALENESS,
    "trainer.global_batch_size": N_SEQUENCES // N,
    "trainer.save_every": 0,
    "rollout.n": N,
    "rollout.max_num_seqs": N_RUNNING,
}


class Rank:
    """Trains for the time of a step on the clock; the last rank of a step waits for it."""

    def __init__(self, number: int, clock: Clock) -> None:
        self._number, self._clock = number, clock

    def accumulate(self, *args: Any) -> None:
        """Its training is in the time of the step."""

    def train_step(self, *args: Any, meta: Any = None) -> Ref:
        return self._trained

    def _trained(self) -> TrainStats:
        if self._number == N_RANKS - 1:
            self._clock.sleep(STEP_S)
        return TrainStats(1.0, N_SEQUENCES * int(MEAN_TOKENS), 0.1, 1e-5)

    def save(self, folder: Path, blocking: bool) -> None:
        folder.mkdir(exist_ok=True)
        (folder / "rank_0").write_bytes(b"nothing")

    def save_finished(self, wait: bool) -> dict[str, Any]:
        return {"rank_0": digest_bytes(b"nothing")}

    def export_hf(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)

    def memory_numbers(self) -> tuple[dict[str, float], ProcessSpans]:
        return {}, ProcessSpans(f"actor {self._number}", "host", [])


class Endpoint:
    def score(self, rollouts: Ref) -> tuple[None, bytes]:
        n = rollouts()
        times = ScoreTimes(0.0, np.ones(n))
        return None, ScoreSummary(np.ones(n, np.float32), np.full(n, 1000, np.int64), times).encode()

    def take_computations(self) -> list[Any]:
        return []


def _roles(ray: SimulatedRay, clock: Clock, config: Any) -> Roles:
    actor = ActorPool([Handle(ray, Rank(number, clock)) for number in range(N_RANKS)], config)
    endpoints = [Handle(ray, Endpoint()) for _ in range(actor.dp_size)]
    return Roles(
        actor=actor,
        rollout=RolloutPool([Handle(ray, engine) for engine in clock.engines], config, actor.dp_size),
        scoring=ScoringPool(endpoints, config.trainer.stage_timeout_s),
        weight_sync=clock,
    )


def measure(n_steps: int) -> Part:
    ray = SimulatedRay()
    process = psutil.Process()
    token_s = STEP_S / _SPARE * N_ENGINES * N_RUNNING / (N_SEQUENCES * MEAN_TOKENS)
    clock = Clock([Engine(token_s, seed) for seed in range(N_ENGINES)])
    seen: list[tuple[float, int, int]] = []  # until each step: CPU seconds of the driver, its memory, chunks
    with tempfile.TemporaryDirectory(prefix="bench_driver_scale.") as root:
        settings = SETTINGS | {"trainer.run_dir": f"{root}/run", "trainer.total_steps": n_steps}
        config = load_config(None, [f"{key}={value}" for key, value in settings.items()])
        prompts = [Prompt(i, np.ones(N_PROMPT, np.int32)) for i in range(N_SEQUENCES // N)]
        folder = open_run_folder(config, {"name": "none", "fingerprint": "none"})
        trainer = Trainer(config, _roles(ray, clock, config), prompts, [], folder, n_steps)
        prefetch, early_part = trainer.source.prefetch, trainer.source.early_part

        def counting_prefetch(step: int) -> None:
            used_s = time.process_time() - ray.cpu_s - clock.cpu_s
            seen.append((used_s, process.memory_info().rss, sum(engine.n_chunks for engine in clock.engines)))
            prefetch(step)

        def waiting_early_part(step: int) -> Any:
            clock.is_waiting = True
            part = early_part(step)
            clock.is_waiting = False
            return part

        trainer.source.prefetch = counting_prefetch  # type: ignore[method-assign]
        trainer.source.early_part = waiting_early_part  # type: ignore[method-assign]
        collect_garbage_rarely()
        trainer.fit()
    last = n_steps - MAX_STALENESS - 2
    third = n_steps // 3
    cpu_s, n_chunks = ((seen[last][i] - seen[_WARM_UP][i]) / (last - _WARM_UP) for i in (0, 2))
    before, after = (float(np.median([rss for _, rss, _ in part])) for part in (seen[third : third + 20], seen[-20:]))
    figures = [
        Figure("CPU of the driver's own code", cpu_s / STEP_S, "of a core", at_most=0.05),
        Figure("the same for each sequence", cpu_s / N_SEQUENCES * 1e6, "us"),
        Figure("growth of its memory after a third of the steps", after / before - 1, at_most=0.02),
        Figure("its memory at the end", after / 2**20, "MiB"),
        Figure("chunks a step", n_chunks),
    ]
    calls = Table("Ray calls a step", ("method", "calls"), [(name, n / n_steps) for name, n in ray.n_calls.items()])
    what = f"{2 * N_RANKS} simulated ranks, {N_ENGINES} engines, {N_SEQUENCES} sequences a step of {STEP_S:g} s."
    return Part("driver", what, figures, [calls], {"steps": n_steps})


def main(argv: Sequence[str] | None = None) -> int:
    """Return 1 if the driver's own code takes too much CPU, or its memory grows."""
    made = parser("tests.bench.bench_driver_scale", __doc__ or "", ("driver",))
    made.add_argument("--steps", type=int, default=1000, metavar="N", help="default: %(default)s; 50 for a glance")
    logging.disable(logging.INFO)
    args = parsed(made, ("driver",), argv)
    return run_parts(args, lambda name: measure(args.steps))


if __name__ == "__main__":
    sys.exit(main())
