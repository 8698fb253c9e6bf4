"""CPU and memory of the driver at scale: 1,024 ranks, 65,536 sequences a step, steps of 10 s, scheduler `stream`.

    python -m tests.bench.bench_driver_scale [--steps 1000] [--engines 64] [--tp 8] [--pp 4] [--json FILE]

Real: `Trainer`, `StreamedBatches`, `StreamScheduler`, the sampler, the dispatcher and the pools of engines, endpoints
and ranks, the coalescing of sequences, the metrics and their files, the settings of the garbage collector. Not real:
the engines, endpoints and ranks, which are objects of this process on a simulated clock, so the CPU time of a step is
divided by 10 s instead of measured over 10 s; their time is measured and not counted. Weight sync does nothing. The
calls of a step are counted, and what they would cost in Ray is an estimate of its own: a sample of each kind is timed
between real Ray actors (`ray_calls`).

Half of the ranks train, the others generate. 1,000 steps take about 10 minutes.
"""

from __future__ import annotations

import argparse
import json
import logging
import subprocess
import sys
import tempfile
import time
from functools import partial
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
from gkd.types import ProcessSpans, Prompt, ScoreTimes, SyncReport, TrainStats
from tests.bench.simulated_engines import Clock, Engine, Workload
from tests.bench.simulated_ray import Apparatus, Ref, SimulatedRay
from tests.bench.teacher_report import machine

RANKS, N_SEQUENCES, N, STEP_S, MAX_STALENESS = 1024, 65_536, 8, 10.0, 2
N_RUNNING, N_PROMPT, MEAN_TOKENS, MAX_TOKENS = 256, 200, 400.0, 1024
MOST_SHARE, MOST_GROWTH = 0.05, 0.02  # of a core; of the memory at a third of the run, until its end
_SPARE = 1.1  # engines are this much faster than training
_WARM_UP = 5


def _no_memory(process: str) -> tuple[dict[str, float], ProcessSpans]:
    return {}, ProcessSpans(process, "host", [])


def _nothing(*args: Any) -> None:
    """An early part costs the driver its call; its training is in the time of the step."""


class Roles1024:
    """The product's pools over objects that answer at once, except that a training step takes `STEP_S` of the clock."""

    def __init__(self, ray: SimulatedRay, clock: Clock, config: Any, n_actors: int) -> None:
        self._clock = clock
        engines = [
            ray.handle(
                open_stream=e.open_stream,
                admit=e.admit,
                waiting=e.waiting,
                stream=e.stream,
                close_stream=e.close_stream,
                usage=e.usage,
                texts=lambda *args: [],
            )
            for e in clock.engines
        ]
        self._trained = 0
        ranks = [
            ray.handle(
                accumulate=_nothing,
                train_step=self._train_step,
                save=self._save,
                save_finished=self._saved,
                export_hf=self._export,
                memory_numbers=partial(_no_memory, f"actor {rank}"),
            )
            for rank in range(n_actors)
        ]
        self.actor = ActorPool(ranks, config)
        endpoints = [
            ray.handle(score=_score, take_computations=list, health=lambda: None) for _ in range(self.actor.dp_size)
        ]
        self.rollout = RolloutPool(engines, config, self.actor.dp_size)
        self.scoring = ScoringPool(endpoints, config.trainer.stage_timeout_s)

    def push(self, policy_version: int) -> SyncReport:
        self._clock.version = policy_version
        return SyncReport(8, 0)

    def _train_step(self, *args: Any, meta: Any = None) -> Ref:
        self._trained += 1
        is_last = self._trained % (RANKS // 2) == 0
        return Ref(self._wait_step if is_last else _stats)

    def _wait_step(self) -> TrainStats:
        self._clock.sleep(STEP_S)
        return _stats()

    def _save(self, folder: Path, blocking: bool) -> None:
        folder.mkdir(exist_ok=True)
        (folder / "rank_0").write_bytes(b"nothing")

    def _saved(self, wait: bool) -> dict[str, Any]:
        return {"rank_0": digest_bytes(b"nothing")}

    def _export(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)


def _score(rollouts: Ref) -> tuple[None, bytes]:
    n = rollouts.get()
    return None, ScoreSummary(np.ones(n, np.float32), np.full(n, 1000, np.int64), ScoreTimes(0.0, np.ones(n))).encode()


def _stats() -> TrainStats:
    return TrainStats(1.0, N_SEQUENCES * int(MEAN_TOKENS), 0.1, 1e-5)


def ray_cost(result: dict[str, Any]) -> dict[str, Any]:
    """Return Ray's own CPU seconds of a step in the driver, by kind of call: measured times counted calls."""
    command = [sys.executable, "-m", "tests.bench.ray_calls"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=120, check=True)
    us: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    calls, n_ranks = result["calls_per_step"], RANKS // 2
    n_handles = n_ranks * result["handles_per_call"]["train_step"]
    seconds = {
        "chunks": result["chunks_per_step"] * (us["chunk"] + us["free"]),
        "prompts": calls["admit"] * us["admit"],
        "training step, calls": n_ranks * us["call"],
        "training step, handles of chunks": n_handles * us["handle"],
        "other calls": (calls["usage"] + result["engines"] + result["exporters"]) * us["call"],
        "idle": STEP_S * us["idle_second"],
    }
    seconds = {kind: value / 1e6 for kind, value in seconds.items()}
    total = sum(seconds.values())
    return {"us_of_a_call": us, "cpu_s": seconds, "total_cpu_s": total, "share": total / STEP_S}


def measure(n_steps: int, n_engines: int, tp: int, pp: int, root: Path) -> dict[str, Any]:
    settings = {
        "data.train_files": "[none]",
        "model.path": "none",
        "eval.metric": "none",
        "actor.tp": tp,
        "actor.pp": pp,
        "trainer.device": "cpu",
        "trainer.n_gpus_per_node": RANKS // 2,
        "rollout.n_gpus_per_node": n_engines,
        "trainer.run_dir": root / "run",
        "trainer.scheduler": "stream",
        "trainer.max_staleness": MAX_STALENESS,
        "trainer.global_batch_size": N_SEQUENCES // N,
        "trainer.save_every": 0,
        "rollout.n": N,
        "rollout.max_num_seqs": N_RUNNING,
        "trainer.total_steps": n_steps,
    }
    config = load_config(None, [f"{key}={value}" for key, value in settings.items()])
    prompts = [Prompt(i, np.ones(N_PROMPT, np.int32)) for i in range(N_SEQUENCES // N)]
    apparatus, process = Apparatus(), psutil.Process()
    ray = SimulatedRay(apparatus)
    ray.install()
    token_s = STEP_S / _SPARE * n_engines * N_RUNNING / (N_SEQUENCES * MEAN_TOKENS)
    workload = Workload(N, N_RUNNING, N_PROMPT, MEAN_TOKENS, MAX_TOKENS, token_s)
    clock = Clock([Engine(workload, seed, apparatus) for seed in range(n_engines)])
    used_s: list[float] = []  # CPU of the driver until each step
    rss: list[int] = []
    seen: list[tuple[float, int, int]] = []  # clock, chunks, waits

    def count_step() -> None:
        used_s.append(time.process_time() - apparatus.cpu_s - clock.cpu_s)
        rss.append(process.memory_info().rss)
        seen.append((clock.now_s, sum(e.n_chunks for e in clock.engines), ray.n_waits))
        if len(used_s) % 25 == 0:
            print(f"step {len(used_s)}: {rss[-1] / 2**20:.0f} MiB", file=sys.stderr, flush=True)

    pools = Roles1024(ray, clock, config, RANKS // 2)
    roles = Roles(actor=pools.actor, rollout=pools.rollout, scoring=pools.scoring, weight_sync=pools)
    folder = open_run_folder(config, {"name": "none", "fingerprint": "none"})
    trainer = Trainer(config, roles, prompts, [], folder, n_steps)
    prefetch, early_part = trainer.source.prefetch, trainer.source.early_part

    def counting_prefetch(step: int) -> None:
        count_step()
        prefetch(step)

    def waiting_early_part(step: int) -> Any:
        with clock.waiting():
            return early_part(step)

    trainer.source.prefetch = counting_prefetch  # type: ignore[method-assign]
    trainer.source.early_part = waiting_early_part  # type: ignore[method-assign]
    collect_garbage_rarely()
    trainer.fit()
    first, last = _WARM_UP, n_steps - MAX_STALENESS - 2
    n = last - first
    per_step = (used_s[last] - used_s[first]) / n
    third = len(rss) // 3
    before, after = (float(np.median(part)) for part in (rss[third : third + 20], rss[-20:]))
    n_chunks = (seen[last][1] - seen[first][1]) / n
    return {
        "ranks": RANKS,
        "engines": n_engines,
        "groups": pools.actor.dp_size,
        "exporters": sum(len(stage) for stage in pools.actor.exporters()),
        "steps": n_steps,
        "sequences": N_SEQUENCES,
        "chunks_per_step": n_chunks,
        "sequences_per_chunk": N_SEQUENCES / n_chunks,
        "simulated_s_per_step": (seen[last][0] - seen[first][0]) / n,
        "calls_per_step": {name: count / n_steps for name, count in ray.n_calls.items()},
        "handles_per_call": {name: count / ray.n_calls[name] for name, count in ray.n_handles.items() if count},
        "fetched_per_step": ray.n_fetched / n_steps,
        "waits_per_step": ray.n_waits / n_steps,
        "apparatus_cpu_s": (apparatus.cpu_s + clock.cpu_s) / n_steps,
        "driver_cpu_s": per_step,
        "driver_share": per_step / STEP_S,
        "us_per_sequence": per_step / N_SEQUENCES * 1e6,
        "rss_mib": [round(value / 2**20, 1) for value in rss[:: max(1, n_steps // 50)]],
        "rss_growth": after / before - 1,
        "met": per_step / STEP_S < MOST_SHARE and after / before - 1 < MOST_GROWTH,
    }


def main() -> int:
    """Return 1 if the driver's own code takes too much CPU, or its memory grows; Ray's calls are an estimate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000, help="default: %(default)s; 50 for a glance")
    parser.add_argument("--engines", type=int, default=64, help="default: %(default)s")
    parser.add_argument("--tp", type=int, default=8, help="of the actor, default: %(default)s")
    parser.add_argument("--pp", type=int, default=4, help="of the actor: 512 / (tp pp) groups; default: %(default)s")
    parser.add_argument("--json", type=Path, metavar="F", help="write the figures here")
    args = parser.parse_args()
    logging.disable(logging.INFO)
    with tempfile.TemporaryDirectory(prefix="bench_driver_scale.") as root:
        result = measure(args.steps, args.engines, args.tp, args.pp, Path(root))
    result["ray"] = ray_cost(result)
    result["share_with_ray"] = result["driver_share"] + result["ray"]["share"]
    result["met_with_ray"] = result["share_with_ray"] < MOST_SHARE
    print(json.dumps({key: value for key, value in result.items() if key != "rss_mib"}, indent=1))
    if args.json is not None:
        args.json.write_text(json.dumps({"machine": machine(), **result}, indent=1) + "\n")
    return 0 if result["met"] else 1


if __name__ == "__main__":
    sys.exit(main())
