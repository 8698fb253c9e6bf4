"""Compute loss, rollout and staleness numbers of one step, and its bottleneck; `run_metrics.py` writes the line."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from gkd.config.declare import function_name
from gkd.config.schema import Config
from gkd.config.schema_sections import AHEAD
from gkd.console.state import plain_s
from gkd.types import FINISH_REASONS, EngineRestarts, ScoredChunk, SyncReport, TrainStats

DATASET_TOKENS = "rollout/dataset_response_tokens"
NO_LOSS = "rollout/no_loss_sequences"
_BLOCKED = 0.05  # share of a step; a pool that the loop waits for less than this is not the bottleneck
_STAGES = {"rollout": ("rollout",), "teacher": ("teacher",), "actor": ("reference", "train")}


def staleness_numbers(batch: Sequence[ScoredChunk], version: int) -> dict[str, float]:
    """Return mean and maximum staleness of the student's sequences, and the share of each value.

    A sequence counts as old as its oldest part.

    Args:
        version: of the weights that train on the batch.
    """
    chunks = [version - c.rollouts.versions for c in batch if c.rollouts.on_policy]
    ages = Counter[int](np.concatenate(chunks).tolist() if chunks else [])
    n = sum(ages.values())
    numbers = {f"staleness/share_{age}": count / n for age, count in sorted(ages.items())}
    mean = sum(age * count for age, count in ages.items()) / n if n else 0.0
    return {"staleness/max": float(max(ages, default=0)), "staleness/mean": mean, **numbers}


def step_numbers(
    batch: Sequence[ScoredChunk], stats: TrainStats, sync: SyncReport, *, version: int, skip_first: int = 0
) -> dict[str, float]:
    """Return all numbers of a step but its times; `rollout/` includes the dataset's responses.

    Args:
        version: of the weights that trained on the batch.
        skip_first: distill.skip_first_tokens.
    """
    chunks = [c.rollouts for c in batch]
    sizes = np.concatenate([chunk.sizes for chunk in chunks], axis=1)
    _, all_tokens, n_response, endings, _, n_repeated, n_observed, _ = sizes.astype(np.int64)
    on_policy = np.repeat([chunk.on_policy for chunk in chunks], [chunk.n_sequences for chunk in chunks])
    n_tokens = int(n_response.sum())
    n_4grams = int(np.maximum(n_response - 3, 0)[on_policy].sum())
    groups = [chunk.dp_rank for chunk in chunks]
    masses = [c.teacher_mass for c in batch if c.teacher_mass is not None]
    return {
        "loss/total": stats.loss,
        "loss/tokens": float(stats.n_loss_tokens),
        "optim/grad_norm": stats.grad_norm,
        "optim/lr": stats.lr,
        "rollout/sequences": float(len(n_response)),
        "rollout/on_policy_sequences": float(on_policy.sum()),
        "rollout/prompt_tokens": float((all_tokens - n_response - n_observed).sum()),
        "rollout/response_tokens": float(n_tokens),
        DATASET_TOKENS: float(n_response[~on_policy].sum()),
        "rollout/response_length_mean": n_tokens / len(n_response),
        **({NO_LOSS: float((n_response <= skip_first).sum())} if skip_first else {}),
        "rollout/truncated_share": float((endings == FINISH_REASONS.index("length")).mean()),
        **({"rollout/repeated_4gram_share": float(n_repeated[on_policy].sum()) / n_4grams} if n_4grams else {}),
        # Of the data-parallel group that generated most, before `gkd.data.scatter` evens them out.
        "perf/group_tokens_max": float(np.bincount(groups, [chunk.n_tokens.sum() for chunk in chunks]).max()),
        **({"teacher/topk_mass": sum(masses) / n_tokens} if masses else {}),
        "teacher/score_bytes": float(sum(c.n_teacher_bytes for c in batch)),
        **staleness_numbers(batch, version),
        "weight_sync/bytes": float(sync.n_bytes),
        "weight_sync/verified_tensors": float(sync.verified_tensors),
        **stats.extra,
    }


def store_numbers(batch: Sequence[ScoredChunk], config: Config) -> dict[str, float]:
    """Return the share of the sequences whose scores were in `teacher.store`; nothing without one.

    Scores that a checkpoint or a recording had are not counted: where they came from is not known.
    """
    # They are complete when they are submitted.
    are_stored = [c.times.completed_s == c.times.submitted_s for c in batch if c.times is not None]
    if not config.teacher.store or not are_stored:
        return {}
    return {"teacher/stored_share": float(np.concatenate(are_stored).mean())}


def turn_numbers(batch: Sequence[ScoredChunk], config: Config) -> dict[str, float]:
    """Return the numbers of the student's trajectories; nothing without an environment."""
    chunks = [chunk.rollouts for chunk in batch if chunk.rollouts.on_policy]
    if not config.rollout.environment or not chunks:
        return {}
    n_turns, endings = (np.concatenate([getattr(c, name) for c in chunks]) for name in ("n_turns", "endings"))
    last = np.minimum(n_turns, config.derived.loss.turns)
    share_ended = {turn: float((last[last >= turn] == turn).mean()) for turn in range(1, int(last.max()) + 1)}
    return {
        "rollout/turns_mean": float(n_turns.mean()),
        "rollout/observed_tokens": float(sum(int(chunk.n_observed.sum()) for chunk in chunks)),
        "rollout/environment_errors": float((endings == FINISH_REASONS.index("environment_error")).mean()),
        **{f"turn/{turn}/share_ended": share for turn, share in share_ended.items()},
    }


def reward_numbers(batch: Sequence[ScoredChunk], config: Config) -> dict[str, float]:
    """Return mean and spread of the rewards, the mean of each function, and prompts and responses without a signal.

    Also what functions made of the responses: the share of those with a weight, and with a prompt of the teacher's own.
    Unknown values have no part in them. Nothing for a batch that no function judges.
    """
    judged = [chunk for chunk in batch if chunk.rewards is not None]
    if not judged:
        return {}
    trained = {}
    if config.distill.response_weight != "none":
        factors = np.concatenate([chunk.numbers[:, 1] for chunk in judged if chunk.numbers is not None])
        trained = {"reward/trained_share": float((factors > 0).mean())}
    if config.teacher.prompt_function != "none":
        are_own = np.concatenate([chunk.of_group[:, 1] for chunk in judged if chunk.of_group is not None])
        trained["teacher/own_prompt_share"] = float(are_own.mean())
    functions = config.reward.functions
    if not functions:
        return trained
    values = np.concatenate([chunk.rewards for chunk in judged if chunk.rewards is not None])
    rewards = values @ np.array([entry.weight for entry in functions])
    is_known = ~np.isnan(values)
    groups = np.concatenate([chunk.rollouts.sample_index for chunk in judged]) // config.rollout.n
    _, group_of = np.unique(groups, return_inverse=True)
    highest = np.full(group_of.max() + 1, -np.inf)
    lowest = np.full(group_of.max() + 1, np.inf)
    whole = is_known.all(axis=1)
    np.maximum.at(highest, group_of[whole], rewards[whole])
    np.minimum.at(lowest, group_of[whole], rewards[whole])
    columns = [values[is_known[:, i], i] for i in range(len(functions))]
    return {
        "reward/mean": _mean(rewards[whole]),
        "reward/std": float(rewards[whole].std()) if whole.any() else math.nan,
        "reward/flat_groups": float((highest <= lowest).mean()),
        "reward/undecided": float((~is_known).sum()),
        **trained,
        **{f"reward/{function_name(entry.path)}/mean": _mean(x) for entry, x in zip(functions, columns, strict=True)},
    }


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if len(values) else math.nan


# Derive from the times of a step what the loop waited for. They equal the duration of a stage only under
# trainer.scheduler=sync; otherwise rollouts and scoring overlap with training.


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
