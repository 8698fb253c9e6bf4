"""Derive from a step what the loop waited for, and the bottleneck pool.

The stages' times (`time/`) are what the loop waited. That equals the duration of a stage only under
trainer.scheduler: sync; otherwise rollouts and scoring overlap with training.
"""

from __future__ import annotations

from gkd.config.schema_trainer import AHEAD
from gkd.console.state import plain_s
from gkd.types import EngineRestarts

_BLOCKED = 0.05  # share of a step; a pool that the loop waits for less than this is not the bottleneck
_STAGES = {"rollout": ("rollout",), "teacher": ("teacher",), "actor": ("reference", "train")}


def restart_numbers(restarts: EngineRestarts) -> dict[str, float]:
    """Return the engines that were started again."""
    return {
        "perf/engine_restarts": float(restarts.restarts),
        "perf/engine_recovery_s": restarts.seconds,
        "perf/prompts_regenerated": float(restarts.prompts),
    }


def shares(numbers: dict[str, float], scheduler: str, engine_busy_s: float | None = None) -> dict[str, float]:
    """Return the share of the step that the loop waited for each pool, the bottleneck, and how busy the engines were.

    Stages that not every step has (evaluation, checkpoint, record) are excluded.

    Args:
        numbers: the step's numbers, with its times.
        engine_busy_s: seconds in passes, mean over the engines; None: they are not known for this step alone.
    """
    step_s = plain_s(numbers)
    result = {
        f"perf/waited_{pool}_share": sum(numbers.get(f"time/{stage}_s", 0.0) for stage in stages) / step_s
        for pool, stages in _STAGES.items()
    }
    if engine_busy_s is not None:
        measured_s = numbers["time/step_s"] - numbers.get("time/eval_s", 0.0)  # a stream generates during a checkpoint
        result["perf/rollout_busy_share"] = engine_busy_s / measured_s
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
