"""Compute loss, rollout and staleness numbers of one step; `run_metrics.py` writes the line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from gkd.config.schema import Config
from gkd.config.schema_reward import function_name
from gkd.handles import ScoredChunk, SyncReport, TrainStats

DATASET_TOKENS = "rollout/dataset_response_tokens"


def staleness_numbers(batch: Sequence[ScoredChunk], version: int) -> dict[str, float]:
    """Return mean and maximum staleness of the student's sequences, and the share of each value.

    A sequence counts as old as its oldest part.

    Args:
        version: of the weights that train on the batch.
    """
    ages = Counter[int]()
    for chunk in (c.rollouts for c in batch if c.rollouts.on_policy):
        ages.update((version - chunk.versions).tolist())
    n = sum(ages.values())
    numbers = {f"staleness/share_{age}": count / n for age, count in sorted(ages.items())}
    mean = sum(age * count for age, count in ages.items()) / n if n else 0.0
    return {"staleness/max": float(max(ages, default=0)), "staleness/mean": mean, **numbers}


def step_numbers(
    batch: Sequence[ScoredChunk], stats: TrainStats, sync: SyncReport, *, version: int
) -> dict[str, float]:
    """Return all numbers of a step but its times; `rollout/` includes the dataset's responses.

    Args:
        version: of the weights that trained on the batch.
    """
    n_sequences = sum(c.rollouts.n_sequences for c in batch)
    n_tokens = sum(c.rollouts.n_response_tokens for c in batch)
    masses = [c.teacher_mass * c.rollouts.n_response_tokens for c in batch if c.teacher_mass is not None]
    n_4grams = sum(c.rollouts.n_4grams for c in batch if c.rollouts.on_policy)
    n_repeated = sum(c.rollouts.n_repeated_4grams for c in batch if c.rollouts.on_policy)
    return {
        "loss/total": stats.loss,
        "loss/tokens": float(stats.n_loss_tokens),
        "optim/grad_norm": stats.grad_norm,
        "optim/lr": stats.lr,
        "rollout/sequences": float(n_sequences),
        "rollout/on_policy_sequences": float(sum(c.rollouts.n_sequences for c in batch if c.rollouts.on_policy)),
        "rollout/prompt_tokens": float(sum(c.rollouts.n_prompt_tokens for c in batch)),
        "rollout/response_tokens": float(n_tokens),
        DATASET_TOKENS: float(sum(c.rollouts.n_response_tokens for c in batch if not c.rollouts.on_policy)),
        "rollout/response_length_mean": n_tokens / n_sequences,
        "rollout/truncated_share": sum(c.rollouts.n_truncated for c in batch) / n_sequences,
        **({"rollout/repeated_4gram_share": n_repeated / n_4grams} if n_4grams else {}),
        "perf/group_tokens_max": float(_heaviest_group(batch)),
        **({"teacher/topk_mass": sum(masses) / n_tokens} if masses else {}),
        "teacher/score_bytes": float(sum(c.n_teacher_bytes for c in batch)),
        **staleness_numbers(batch, version),
        "weight_sync/bytes": float(sync.n_bytes),
        "weight_sync/verified_tensors": float(sync.verified_tensors),
        **stats.extra,
    }


def reward_numbers(batch: Sequence[ScoredChunk], config: Config) -> dict[str, float]:
    """Return mean and spread of the rewards, the mean of each function, and prompts and responses without a signal.

    Nothing for a batch that no function judges.
    """
    judged = [chunk for chunk in batch if chunk.rewards is not None]
    if not judged:
        return {}
    functions = config.reward.functions
    values = np.concatenate([chunk.rewards for chunk in judged if chunk.rewards is not None])
    rewards = values @ np.array([entry.weight for entry in functions])
    groups = np.concatenate([chunk.rollouts.sample_index for chunk in judged]) // config.rollout.n
    _, own = np.unique(groups, return_inverse=True)
    highest, lowest = np.full(own.max() + 1, -np.inf), np.full(own.max() + 1, np.inf)
    np.maximum.at(highest, own, rewards)
    np.minimum.at(lowest, own, rewards)
    means = zip(functions, values.mean(axis=0).tolist(), strict=True)
    return {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "reward/flat_groups": float((highest == lowest).mean()),
        "reward/undecided": float(sum(chunk.n_undecided for chunk in judged)),
        **{f"reward/{function_name(entry.path)}/mean": mean for entry, mean in means},
    }


def _heaviest_group(batch: Sequence[ScoredChunk]) -> int:
    """Return the tokens of the data-parallel group that generated most, before `gkd.data.balance` evens them out."""
    tokens: dict[int, int] = {}
    for chunk in (c.rollouts for c in batch):
        tokens[chunk.dp_rank] = tokens.get(chunk.dp_rank, 0) + chunk.n_prompt_tokens + chunk.n_response_tokens
    return max(tokens.values())
