"""Time of a step under each scheduler against the time of its slowest stage.

    python -m tests.bench.bench_pipeline [--json FILE] [--steps N] [--shapes A,B] [--schedulers A,B]

The trainer, schedulers, dispatcher, engine loops, scoring endpoints and Ray's actors are the product's own. A stage
waits for a clock instead of computing (`tests.bench.timed_roles`), so two cores suffice: an engine holds each pass for
a time that depends on its sequences, the teacher and the actor hold for a time in proportion to tokens, and a weight
sync takes a constant. Responses have a long tail. About 20 minutes.

The time of a stage is what its clock holds for the step's tokens. A batch of rollouts that starts together ends with
engines half empty, so the time of the rollout is that of the `sync` run of the same shape; under `stream` engines need
never be empty, so there it is that of full engines.
"""

from __future__ import annotations

import argparse
import queue
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import ray

from gkd.actor.pool import ActorPool
from gkd.cluster.calls import gather
from gkd.cluster.cluster import HELPER_CPUS, Cluster, PoolSpec
from gkd.config.load import load_config
from gkd.config.schema import Config
from gkd.metrics.writer import read_metrics
from gkd.roles import Computation
from gkd.rollout.driver.pool import RolloutPool
from gkd.rollout.driver.weight_sync import WeightSync
from gkd.rollout.engine import worker as rollout_worker
from gkd.run.open import open_run_folder
from gkd.scoring.endpoint import ScoringEndpoint
from gkd.scoring.pool import RECORDS, ScoringPool
from gkd.scoring.teacher.window import Window
from gkd.start.pools import worker_env
from gkd.text.comparison import SAME_TOKENS
from gkd.trainer import Roles, Trainer
from gkd.types import Prompt, Rollout, TeacherScores
from teacher_server.wire.table import TopKTable
from tests.bench.teacher_report import machine
from tests.bench.timed_roles import SAVES, Clock, Meeting, Rates, Stages, TimedActorWorker, TimedRolloutWorker
from tests.results import write_results

# Settings of each; `stream_1` and `stream_4` are `stream` with other bounds, the default one among them.
SCHEDULERS: dict[str, dict[str, Any]] = {
    "sync": {"trainer.scheduler": "sync"},
    "one_step_off": {"trainer.scheduler": "one_step_off"},
    "two_step_off": {"trainer.scheduler": "two_step_off"},
    "stream": {"trainer.scheduler": "stream", "trainer.max_staleness": 2},
    "stream_1": {"trainer.scheduler": "stream", "trainer.max_staleness": 1},
    "stream_4": {"trainer.scheduler": "stream", "trainer.max_staleness": 4},
}
# Shape -> seconds a step of the teacher and of the actor; the engines take about a second for a batch alone. At
# "rollout" the longest responses last three steps: a bound of 2 makes `stream` wait for them.
SHAPES = {"balanced": (1.0, 1.0), "rollout": (0.4, 0.4), "teacher": (1.6, 0.5), "train": (0.5, 1.6)}
BATCH, N_ENGINES, MAX_RUNNING, PROMPT, MEAN, LONGEST, WARM_UP = 64, 2, 16, 12, 32.0, 192, 3
# Of each run. At "rollout" a few long responses decide how long a step waits, so more of them are drawn.
STEPS, ROLLOUT_STEPS = 20, 100
MOST = {"one_step_off": 1.25, "two_step_off": 1.10, "stream": 1.10, "stream_4": 1.10}  # goals: step / slowest stage
LEAST_SPEED_UP = 1.8  # at balance


def stages(shape: str) -> Stages:
    teacher_s, train_s = (seconds / (BATCH * (PROMPT + MEAN)) for seconds in SHAPES[shape])
    rates = Rates(
        pass_s=0.005,
        sequence_s=0.00025,
        prefill_s=0.0,
        score_token_s=teacher_s,
        train_s=0.0,
        train_token_s=train_s,
        sync_s=0.01,
    )
    return Stages(rates, mean_tokens=MEAN, sigma=0.8)


class ClockTeacher:
    """Scores one sequence after the other, in a thread."""

    def __init__(self, token_s: float) -> None:
        self._token_s, self._clock = token_s, Clock()
        self._queue: queue.SimpleQueue[tuple[int, Future[Any]]] = queue.SimpleQueue()
        self._lock = threading.Lock()  # guards the next two lines
        self._computed: list[Computation] = []  # periods without a pause
        self._since_s: float | None = None  # start of the period in progress
        self._one = np.zeros((1, 1), np.float32)
        threading.Thread(target=self._run, daemon=True).start()

    def submit(self, n_tokens: int) -> Future[Any]:
        future: Future[Any] = Future()
        self._queue.put((n_tokens, future))
        return future

    def take(self) -> list[Computation]:
        with self._lock:
            self._cut(time.time())
            taken, self._computed = self._computed, []
        return taken

    def _run(self) -> None:
        while True:
            n_tokens, future = self._queue.get()
            with self._lock:
                if self._since_s is None:
                    self._since_s = time.time()
                    self._clock.start()
            self._clock.hold(self._token_s * n_tokens)
            if self._queue.empty():
                with self._lock:
                    self._cut(time.time())
                    self._since_s = None
            if future.set_running_or_notify_cancel():
                table = TopKTable(self._one.astype(np.int32), self._one, self._one[0])
                future.set_result([TeacherScores(table)])

    def _cut(self, now_s: float) -> None:
        if self._since_s is not None and now_s > self._since_s:
            self._computed.append(Computation("clock", now_s, 0.0, now_s - self._since_s, 1))
            self._since_s = now_s


class ClockEndpoint(ScoringEndpoint):
    """Asks a clock about each sequence instead of a server; a request has one sequence."""

    def prepare(self, token_s: float) -> None:
        self._clock_teacher = ClockTeacher(token_s)

    def clients(self) -> list[Any]:
        return [self._clock_teacher]

    def _submit(self, teacher: Any, rollouts: Sequence[Rollout]) -> Future[Any]:
        (rollout,) = rollouts
        submitted: Future[Any] = teacher.submit(rollout.n_tokens)
        return submitted

    def take_computations(self) -> list[Computation]:
        return self._clock_teacher.take()


class Processes:
    """Actor ranks, an endpoint of each, and engines, started once for all runs; a run uses some of them."""

    def __init__(self, n_ranks: int, n_engines: int) -> None:
        self._cluster, env = Cluster("", n_slots=n_ranks + n_engines, on_cpu=True), worker_env(True)
        specs = [PoolSpec("actor", 1, n_ranks, 1), PoolSpec("rollout", 1, n_engines, 1)]
        pools, groups = self._cluster.make_pools(specs, 60.0), rollout_worker.CONCURRENCY_GROUPS
        self._ranks = pools["actor"].spawn(TimedActorWorker, env, concurrency_groups=(SAVES,))
        self._engines = pools["rollout"].spawn(TimedRolloutWorker, env, concurrency_groups=groups)
        options = {"num_cpus": HELPER_CPUS, "max_concurrency": 8, "runtime_env": {"env_vars": env}}
        made = ray.remote(concurrency_groups={RECORDS: 1})(ClockEndpoint).options(**options)
        config = load_config(None, ["trainer.device=cpu"])
        self._endpoints = [made.remote(config, SAME_TOKENS, [""], [Window(64)]) for _ in self._ranks]

    def train(self, config: Config, timed: Stages, n_prompt: int) -> None:
        """Make a run. Its prompts have `n_prompt` tokens."""
        n_ranks = config.derived.dp_size
        n_engines = config.derived.n_engines
        ranks = self._ranks[:n_ranks]
        engines = self._engines[:n_engines]
        endpoints = self._endpoints[:n_ranks]
        meeting = ray.remote(Meeting).options(num_cpus=0).remote(n_engines)
        calls = {f"rank {i}": rank.prepare.remote(timed) for i, rank in enumerate(ranks)}
        calls |= {f"engine {i}": one.prepare.remote(config, timed, meeting) for i, one in enumerate(engines)}
        calls |= {f"endpoint {i}": one.prepare.remote(timed.rates.score_token_s) for i, one in enumerate(endpoints)}
        gather(calls, "prepare", 240.0)
        actor = ActorPool(ranks, config)
        sync = WeightSync(actor.exporters(), engines, config, "cpu", timeout_s=60.0)
        roles = Roles(actor, RolloutPool(engines, config, n_ranks), ScoringPool(endpoints, 120.0), sync)
        n_steps = config.trainer.total_steps
        prompts = [Prompt(i, np.ones(n_prompt, np.int32)) for i in range(config.trainer.global_batch_size * n_steps)]
        folder = open_run_folder(config, {"name": "timed", "fingerprint": "none"})
        Trainer(config, roles, prompts, [], folder, n_steps).fit()

    def close(self) -> None:
        self._cluster.close()


def config_of(folder: Path, scheduler: str, n_steps: int) -> Config:
    settings = {
        "data.train_files": "[none]",
        "data.max_response_length": LONGEST,
        "model.path": "none",
        "eval.metric": "none",
        "trainer.device": "cpu",
        "trainer.run_dir": folder,
        "trainer.global_batch_size": BATCH,
        "trainer.n_gpus_per_node": 1,
        "rollout.n_gpus_per_node": N_ENGINES,
        "rollout.max_num_seqs": MAX_RUNNING,
        "weight_sync.verify": "never",
        "trainer.total_steps": n_steps,
        **SCHEDULERS[scheduler],
    }
    return load_config(None, [f"{key}={value}" for key, value in settings.items()])


def run(processes: Processes, folder: Path, shape: str, scheduler: str, n_steps: int) -> dict[str, Any]:
    """Return step time, and seconds of each stage: what its clock holds for the tokens of a mean step.

    The first steps are left out, and those at the end that have nothing more to prefetch.
    """
    config = config_of(folder, scheduler, n_steps)
    timed = stages(shape)
    rates = timed.rates
    processes.train(config, timed, PROMPT)
    lines = read_metrics(folder / "metrics.jsonl")[WARM_UP : n_steps - 2]

    def mean(key: str) -> float:
        return float(np.mean([line[key] for line in lines]))

    responses = mean("rollout/response_tokens")
    tokens = responses + mean("rollout/prompt_tokens")
    full_engines_s = responses / (N_ENGINES * MAX_RUNNING) * (rates.pass_s + MAX_RUNNING * rates.sequence_s)
    return {
        "shape": shape,
        "scheduler": scheduler,
        "step_s": mean("time/step_s"),
        "rollout_s": full_engines_s if scheduler.startswith("stream") else mean("time/rollout_s"),
        "teacher_s": tokens * rates.score_token_s,
        "train_s": tokens * rates.train_token_s,
    }


def compare(run: dict[str, Any], sync: dict[str, Any]) -> None:
    """Add to a run its ratio to the slowest stage, and to the `sync` run of its shape."""
    if not run["scheduler"].startswith("stream"):
        run["rollout_s"] = sync["rollout_s"]
    run["slowest"] = max(("rollout", "teacher", "train"), key=lambda stage: run[f"{stage}_s"])
    run["ratio"] = run["step_s"] / run[f"{run['slowest']}_s"]
    run["speed_up"] = sync["step_s"] / run["step_s"]


def missed(runs: list[dict[str, Any]]) -> list[str]:
    """Return what the runs miss of the goals."""
    found = [
        f"{run['shape']}, {run['scheduler']}: {run['ratio']:.2f} of the slowest stage"
        for run in runs
        if run["ratio"] > MOST.get(run["scheduler"], np.inf)
    ]
    fastest = max((r["speed_up"] for r in runs if r["shape"] == "balanced"), default=np.inf)
    return found + ([f"speed-up at balance: {fastest:.2f}"] if fastest < LEAST_SPEED_UP else [])


def as_row(run: dict[str, Any]) -> str:
    numbers = f"{run['step_s']:8.3f}{run['slowest']:>9}{run['ratio']:7.2f}{run['speed_up']:9.2f}"
    return f"{run['shape']:10}{run['scheduler']:14}{numbers}"


def measure(root: Path, shapes: list[str], schedulers: list[str], steps: int) -> list[dict[str, Any]]:
    runs: list[dict[str, Any]] = []
    print(f"{'shape':10}{'scheduler':14}{'step s':>8}{'slowest':>9}{'ratio':>7}{'speed-up':>9}")
    with closing(Processes(1, N_ENGINES)) as processes:
        for shape in shapes:
            n_steps = steps or (ROLLOUT_STEPS if shape == "rollout" else STEPS)
            sync: dict[str, Any] = {}
            for scheduler in ("sync", *schedulers):
                if scheduler == "stream_4" and shape != "rollout":
                    continue  # a bound of 2 is enough
                found = run(processes, root / f"{shape}_{scheduler}", shape, scheduler, n_steps)
                sync = sync or found
                compare(found, sync)
                runs.append(found)
                print(as_row(found), flush=True)
    return runs


def main() -> int:
    """Return 1 if a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="F", help="write the results to this file")
    parser.add_argument("--steps", type=int, default=0, help=f"of each run; default: {STEPS} or {ROLLOUT_STEPS}")
    parser.add_argument("--shapes", type=lambda text: text.split(","), default=list(SHAPES), metavar="A,B")
    others = [name for name in SCHEDULERS if name != "sync"]
    parser.add_argument("--schedulers", type=lambda text: text.split(","), default=others, metavar="A,B")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench_pipeline.") as root:
        runs = measure(Path(root), args.shapes, args.schedulers, args.steps)
    goals = missed(runs)
    print(*(f"missed: {goal}" for goal in goals), sep="\n")
    if args.json is not None:
        write_results(args.json, {"machine": machine(), "runs": runs, "missed": goals}, levels=2)
    return 1 if goals else 0


if __name__ == "__main__":
    sys.exit(main())
