"""Measure the start of the pools on this machine: concurrently, as in training, and one after the other.

    python -m tests.bench.bench_startup [--only tiny,larger] [--json FILE] [--rounds N]

Real processes, Megatron-core and vLLM, with a model of 2 million parameters and with one of 200 million; one actor rank
and one engine, so that on two cores each has its own. The time runs from the first process until all are ready. It
excludes Ray: the benchmark waits for Ray's agents, which import for some seconds after `ray.init` has returned. Their
cost without this wait is reported separately.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from gkd.actor import worker as actor_worker
from gkd.actor.pool import ActorPool
from gkd.actor.worker import ActorWorker
from gkd.cluster.calls import gather
from gkd.cluster.cluster import Cluster
from gkd.config.load import load_config
from gkd.config.schema import Config
from gkd.rollout.driver.pool import RolloutPool
from gkd.rollout.engine import worker as rollout_worker
from gkd.rollout.engine.worker import RolloutWorker
from gkd.start.pools import pool_specs, worker_env
from tests.bench.command import parsed, parser, run_parts
from tests.bench.student_case import save_model
from tests.bench.teacher_report import Figure, Part, Table

_LIMIT_S = 300.0
_LARGER = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 16}


def start(config: Config, *, at_once: bool, after_ray: bool = True) -> tuple[float, float]:
    """(until the actor pool is up, until both are), seconds. One after the other, the actor comes first.

    Args:
        after_ray: begin when Ray's own processes are up, not when `ray.init` returns.
    """
    actor_spec, rollout_spec = pool_specs(config)
    cluster = Cluster("", n_slots=actor_spec.n_gpus + rollout_spec.n_gpus, on_cpu=True)
    try:
        slots = cluster.make_pools([actor_spec, rollout_spec], 60)
        env = worker_env(on_cpu=True)
        if after_ray:
            _wait_for_quiet()
        began = time.perf_counter()

        def build_rollout() -> dict[str, object]:
            engines = slots["rollout"].spawn(RolloutWorker, env, concurrency_groups=rollout_worker.CONCURRENCY_GROUPS)
            return RolloutPool(engines, config, 1).init_model("cpu", [1])

        building = build_rollout() if at_once else {}
        actor = ActorPool(
            slots["actor"].spawn(ActorWorker, env, concurrency_groups=actor_worker.CONCURRENCY_GROUPS), config
        )
        gather(actor.init_model("cpu", 1, _LIMIT_S), "actor", _LIMIT_S)
        actor_s = time.perf_counter() - began
        gather(building or build_rollout(), "rollout", _LIMIT_S)
        return actor_s, time.perf_counter() - began
    finally:
        cluster.close()


def _wait_for_quiet(limit_s: float = 60.0) -> None:
    """Until this machine does nothing for a second (a tenth of a core is nothing). Raises TimeoutError."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        before, began = _busy_s(), time.monotonic()
        time.sleep(1.0)
        if (_busy_s() - before) / (time.monotonic() - began) < 0.1:
            return
    raise TimeoutError(f"this machine was never quiet within {limit_s:g} s: what else runs on it?")


def _busy_s() -> float:
    """CPU seconds of all cores since boot, but for waiting."""
    ticks = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    return (sum(ticks[:3]) + sum(ticks[5:8])) / os.sysconf("SC_CLK_TCK")


def tiny(rounds: int) -> Part:
    return _concurrent("tiny", {}, rounds)


def larger(rounds: int) -> Part:
    return _concurrent("larger", _LARGER, rounds)


def _concurrent(name: str, sizes: dict[str, int], rounds: int) -> Part:
    """Both pools at once, as a share of one after the other.

    Args:
        sizes: of the student; empty: those of the end-to-end tests.
    """
    from tests.e2e.conftest import VOCAB, make_lab

    with tempfile.TemporaryDirectory() as folder:
        lab = make_lab(Path(folder))
        if sizes:
            save_model(lab.student, vocab_size=VOCAB, head_dim=64, num_key_value_heads=4, **sizes)
        config = load_config(None, lab.command(Path(folder) / "run", 1)[5:])
        start(config, at_once=True)  # the files of all libraries are in the page cache from now on
        ratios, with_ray, rows = [], [], []
        for number in range(rounds):
            actor_s, sequential_s = start(config, at_once=False)
            _, concurrent_s = start(config, at_once=True)
            _, beside_ray_s = start(config, at_once=True, after_ray=False)
            ratios.append(concurrent_s / sequential_s)
            with_ray.append(beside_ray_s / sequential_s)
            seconds = [actor_s, sequential_s - actor_s, sequential_s, concurrent_s, beside_ray_s]
            rows.append([str(number), *(f"{value:.1f}" for value in seconds), f"{ratios[-1]:.2f}"])
    figures = [
        Figure("both pools at once / one after the other", median(ratios), at_most=0.65),
        Figure("the same, both at once beside Ray's own start", median(with_ray)),
    ]
    alone = ["actor alone, s", "rollout alone, s", "one after the other, s"]
    head = ["round", *alone, "at once, s", "at once beside Ray's start, s", "ratio"]
    what = (
        f"One Megatron-core rank and one vLLM engine on {os.cpu_count()} cores, from the first process to the last one "
        "that is up. The best there can be is the longer one's share of both."
    )
    return Part(name, what, figures, [Table("seconds", head, rows)], {"rounds": rounds} | sizes)


def main(argv: Sequence[str] | None = None) -> int:
    parts = {"tiny": tiny, "larger": larger}
    args = parsed(parser("tests.bench.bench_startup", __doc__ or "", parts, rounds=3), parts, argv)
    return run_parts(args, lambda name: parts[name](args.rounds))


if __name__ == "__main__":
    sys.exit(main())
