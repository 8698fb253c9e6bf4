"""Derive from a step the bottleneck pool, and the sums in tuner.jsonl that the split tuner reads.

The stages' times (`time/`) are what the loop waited. That equals the duration of a stage only under
trainer.scheduler: sync; otherwise rollouts and scoring overlap with training.

From how busy the teacher was the split tuner derives the rate of one worker. A teacher of n workers is fully busy while
n or more requests are open, whichever step they belong to. So the meter measures a time window in which all requests
are known. The driver learns of a request with its batch, and requests submitted before the weights of step s are pushed
belong to batches up to step s + staleness bound.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from gkd.config.schema import Config
from gkd.config.schema_trainer import AHEAD
from gkd.console.state import plain_s
from gkd.types import EngineRestarts, RolloutUsage, ScoredChunk

# Sums over the engines' passes, see `gkd.rollout.vllm.engine.PassMeter`: name -> index in the products of (1, b, p, s).
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
WORKERS = tuple(2**i for i in range(13))  # sizes of the teacher whose busy time is recorded; see `TeacherMeter`
# The layout of each step: a resumed run may have other pools.
SINCE_START = "perf/steps_since_start"  # 1, 2, ...; starts again from 1 after a resume
DP, ENGINES, MAX_NUM_SEQS = "perf/dp", "perf/engines", "perf/max_num_seqs"
WITH_EVALUATION = "perf/with_evaluation"  # 1: the engines' numbers of this step include an evaluation
LONGEST = "perf/response_length_max"  # tokens of the longest response that finished in this step; 0 if none did
REFERENCE_S = "perf/reference_s"  # duration of the reference's pass, even if the loop waited for the teacher meanwhile
GENERATE_S = "perf/generate_s"  # time from the first call to an engine to the last chunk of the batch
_BLOCKED = 0.05  # share of a step; a pool that the loop waits for less than this is not the bottleneck
_STAGES = {"rollout": ("rollout",), "teacher": ("teacher",), "actor": ("reference", "train")}


def busy_name(n_workers: int) -> str:
    return f"perf/teacher_busy_{n_workers}_s"


def layout_numbers(config: Config, since_start: int) -> dict[str, float]:
    """Return the layout that a step ran on.

    Args:
        since_start: steps since the run was started or resumed, this one included.
    """
    dp, limit = config.derived.dp_size, config.rollout.sequence_limit
    return {SINCE_START: float(since_start), DP: float(dp), MAX_NUM_SEQS: float(limit)}


def rollout_numbers(usage: RolloutUsage) -> dict[str, float]:
    """Return the sums over the engines' passes, the duration of generation, and the longest response."""
    engines = usage.engines
    products = sum((engine.products for engine in engines), np.zeros((4, 4)))
    numbers = {name: float(products[index]) for name, index in PASS_SUMS.items()}
    numbers["perf/gap_s"] = sum(engine.gap_s for engine in engines)
    numbers[ENGINES] = float(len(engines))
    numbers["perf/engine_busy_max_s"] = max((engine.busy_s for engine in engines), default=0.0)
    numbers[GENERATE_S] = usage.generate_s
    numbers[LONGEST] = float(max((engine.longest_response for engine in engines), default=0))
    return numbers


def restart_numbers(restarts: EngineRestarts) -> dict[str, float]:
    """Return the engines that were started again."""
    return {
        "perf/engine_restarts": float(restarts.restarts),
        "perf/engine_recovery_s": restarts.seconds,
        "perf/prompts_regenerated": float(restarts.prompts),
    }


def shares(numbers: dict[str, float], scheduler: str) -> dict[str, float]:
    """Return the share of the step that the loop waited for each pool, the bottleneck, and how busy the engines were.

    Stages that not every step has (evaluation, checkpoint, record) are excluded.

    Args:
        numbers: the step's numbers from both files, with its times.
    """
    step_s = plain_s(numbers)
    result = {
        f"perf/waited_{pool}_share": sum(numbers.get(f"time/{stage}_s", 0.0) for stage in stages) / step_s
        for pool, stages in _STAGES.items()
    }
    if numbers.get(ENGINES) and WITH_EVALUATION not in numbers:
        measured_s = numbers["time/step_s"] - numbers.get("time/eval_s", 0.0)  # a stream generates during a checkpoint
        result["perf/rollout_busy_share"] = numbers["perf/pass_s"] / numbers[ENGINES] / measured_s
    slowest, _ = bottleneck(result, scheduler)
    return result | {f"perf/bound_by_{pool}": float(pool == slowest) for pool in _STAGES}


def bottleneck(numbers: dict[str, float], scheduler: str) -> tuple[str, float]:
    """Return the bottleneck pool, and the share of the step that the loop waited for it.

    Under sync it is the longest stage. Under the other schedulers rollouts and scoring overlap with training: if the
    loop waits for one of them, that pool is slower than the actor; otherwise the actor is the bottleneck.
    """
    waited = {pool: numbers[f"perf/waited_{pool}_share"] for pool in _STAGES}
    if AHEAD.get(scheduler) != 0:
        overlapped = {pool: share for pool, share in waited.items() if pool != "actor"}
        waited = {"actor": waited["actor"]} if max(overlapped.values()) < _BLOCKED else overlapped
    pool = max(waited, key=lambda name: waited[name])
    return pool, waited[pool]


SEQUENCES = "perf/teacher_sequences"  # completed in the window
TOKENS = "perf/teacher_tokens"  # tokens of these sequences: the student's prompt and response


class TeacherMeter:
    """Receives scored batches, and returns once per step how busy the teacher was in an earlier step.

    Args:
        delay: steps until all requests of a window are known: the scheduler's staleness bound.
        clock: the clock of `ScoreTimes`.
    """

    def __init__(self, delay: int, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._ends: deque[float] = deque(maxlen=delay + 2)  # ends of the last steps, before their weights were pushed
        self._requests = np.zeros((3, 0))  # [3, sequences]: submitted_s, completed_s, tokens

    def add(self, batch: Sequence[ScoredChunk]) -> None:
        """Add scores that have arrived. Scores from a checkpoint have no times and are ignored."""
        timed = [(c.times, c.rollouts) for c in batch if c.times is not None]
        if not timed:
            return
        submitted_s = np.repeat([times.submitted_s for times, _ in timed], [chunk.n_sequences for _, chunk in timed])
        completed_s = np.concatenate([times.completed_s for times, _ in timed])
        n_tokens = np.concatenate([chunk.n_tokens for _, chunk in timed])
        new = np.stack([submitted_s, completed_s, n_tokens])
        self._requests = np.concatenate([self._requests, new], axis=1)

    def end_step(self) -> dict[str, float]:
        """End a step; the first call starts the first one. Call it before the engines get new weights.

        Returns:
            Numbers of the step that ended `delay` steps ago: the sequences and tokens that were completed, and the busy
            seconds of a teacher with 1, 2, 4, ... workers: min(open requests, workers), integrated over time. The
            result is empty if there is no such step yet, or if no request was open in it.
        """
        self._ends.append(self._clock())
        if len(self._ends) < (self._ends.maxlen or 0):
            return {}
        begin_s, end_s = self._ends[0], self._ends[1]
        submitted, completed, tokens = self._requests
        self._requests = self._requests[:, completed > end_s]
        was_open = (submitted < end_s) & (completed > begin_s)
        if not was_open.any():
            return {}
        done = was_open & (completed <= end_s)
        numbers = {SEQUENCES: float(done.sum()), TOKENS: float(tokens[done].sum())}
        return numbers | _busy(np.maximum(submitted[was_open], begin_s), np.minimum(completed[was_open], end_s))


def _busy(submitted: np.ndarray, completed: np.ndarray) -> dict[str, float]:
    """Return the busy seconds by number of workers, up to the largest number of requests open at a time."""
    at = np.concatenate([submitted, completed])
    order = np.argsort(at, kind="stable")
    n_open = np.cumsum(np.repeat([1, -1], len(submitted))[order])[:-1]
    lasted_s = np.diff(at[order])
    most = int(n_open.max())
    return {
        busy_name(n): float(np.minimum(n_open, n) @ lasted_s)
        for i, n in enumerate(WORKERS)
        if i == 0 or WORKERS[i - 1] < most
    }
