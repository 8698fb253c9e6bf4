"""What each pool did in a step, whatever the loop waited for: the numbers that `gkd.tools.split_tuner.rates` reads.

The stages' own times (`time/`) say what the loop waited. That is what a stage takes only under trainer.scheduler: sync;
elsewhere the engines and the teacher work beside the training.
"""

from __future__ import annotations

import numpy as np

from gkd.config.derived import derive
from gkd.config.schedulers import AHEAD
from gkd.config.schema import Config
from gkd.handles import RolloutUsage

# Points of the distribution of response lengths that are kept, per cent.
QUANTILES = (0, 10, 20, 30, 40, 50, 60, 70, 80, 90, 95, 99, 100)
# Sums over the engines' passes, see `gkd.rollout.usage.PassMeter`: name -> place in the products of (1, b, p, s).
PASS_SUMS = {
    "perf/pass_n": (0, 0),
    "perf/pass_b": (0, 1),
    "perf/pass_p": (0, 2),
    "perf/pass_s": (0, 3),
    "perf/pass_bb": (1, 1),
    "perf/pass_bp": (1, 2),
    "perf/pass_bs": (1, 3),
    "perf/pass_pp": (2, 2),
    "perf/pass_ps": (2, 3),
}
# Teachers of so many workers would have been busy with the questions that were open; see `gkd.metrics.teacher_meter`.
WORKERS = tuple(2**i for i in range(13))
# Whose numbers these are: a run may go on with other pools than it began with.
SINCE_START = "perf/steps_since_start"  # 1, 2 ... and again from 1 where the run was resumed
DP, ENGINES, MAX_NUM_SEQS = "perf/dp", "perf/engines", "perf/max_num_seqs"
WITH_EVALUATION = "perf/with_evaluation"  # 1: the engines' numbers of this step are also those of an evaluation
LENGTH_MEAN = "perf/response_length_mean"  # of what the engines finished in this step
NOT_EACH_STEP = ("eval", "checkpoint", "record")  # stages that say nothing of the split
_BLOCKED = 0.05  # share of a step; who is waited for less long than this holds nobody up


def quantile_name(percent: int) -> str:
    return f"perf/response_length_q{percent:02d}"


def busy_name(n_workers: int) -> str:
    return f"perf/teacher_busy_{n_workers}_s"


def layout_numbers(config: Config, since_start: int) -> dict[str, float]:
    """Of which run these are, so that nobody reads them as another one's.

    Args:
        since_start: steps since the run was started or resumed, with this one.
    """
    dp, limit = derive(config).dp_size, config.rollout.max_num_seqs
    return {SINCE_START: float(since_start), DP: float(dp), MAX_NUM_SEQS: float(limit)}


def rollout_numbers(usage: RolloutUsage) -> dict[str, float]:
    """The engines' passes, how long the batch's answers took, and how long those answers are."""
    engines = usage.engines
    products = sum((engine.products for engine in engines), np.zeros((4, 4)))
    lengths = np.concatenate([np.zeros(0, np.int32), *(engine.response_lengths for engine in engines)])
    numbers = {name: float(products[place]) for name, place in PASS_SUMS.items()}
    numbers["perf/gap_s"] = sum(engine.gap_s for engine in engines)
    numbers[ENGINES] = float(len(engines))
    numbers["perf/engine_busy_max_s"] = max((engine.busy_s for engine in engines), default=0.0)
    numbers["perf/answer_s"] = usage.generate_s
    numbers |= usage.memory
    if lengths.size:
        points = np.percentile(lengths, QUANTILES)
        numbers[LENGTH_MEAN] = float(lengths.mean())
        numbers |= {quantile_name(q): float(x) for q, x in zip(QUANTILES, points, strict=True)}
    return numbers


def _each_step_s(numbers: dict[str, float]) -> float:
    """The step's seconds without the stages that not every step has."""
    return numbers["time/step_s"] - sum(numbers.get(f"time/{stage}_s", 0.0) for stage in NOT_EACH_STEP)


def shares(numbers: dict[str, float], scheduler: str) -> dict[str, float]:
    """How much of the step the loop waited for each pool, and how much of it the engines were busy. The stages that
    not every step has count for none of it.

    Args:
        numbers: the step's, with its times.
    """
    step_s = _each_step_s(numbers)
    stages = {"rollout": ("rollout",), "teacher": ("teacher",), "actor": ("reference", "train")}
    waited = {
        f"perf/waited_{pool}_share": sum(numbers.get(f"time/{stage}_s", 0.0) for stage in of_pool) / step_s
        for pool, of_pool in stages.items()
    }
    if numbers.get(ENGINES) and WITH_EVALUATION not in numbers:
        measured_s = numbers["time/step_s"] - numbers.get("time/eval_s", 0.0)  # a stream goes on beside a checkpoint
        waited["perf/rollout_busy_share"] = numbers["perf/pass_s"] / numbers[ENGINES] / measured_s
    pool, _ = waited_for(waited, scheduler)
    return waited | {f"perf/bound_by_{name}": float(name == pool) for name in ("rollout", "teacher", "actor")}


def waited_for(numbers: dict[str, float], scheduler: str) -> tuple[str, float]:
    """The pool that holds the others up, and the share of the step that the loop waited for it.

    Under sync the stages take turns: the one that takes longest. Elsewhere rollout and teacher work beside the
    training, so if the loop waits for one of them at all, that one is slower than the training; if not, the training
    is.
    """
    waited = {pool: numbers[f"perf/waited_{pool}_share"] for pool in ("rollout", "teacher", "actor")}
    beside = {pool: share for pool, share in waited.items() if pool != "actor"}
    if AHEAD.get(scheduler) != 0 and max(beside.values()) < _BLOCKED:
        return "actor", waited["actor"]
    among = waited if AHEAD.get(scheduler) == 0 else beside
    pool = max(among, key=lambda name: among[name])
    return pool, among[pool]
