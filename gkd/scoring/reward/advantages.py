"""Compute the advantages of a global batch on the driver, which has all rewards: 8 bytes per sequence and function.

So means are over the whole group or batch, whichever data-parallel groups, chunks or parts of a stream's chunks
have its sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from gkd.types import ScoredChunk

_EPSILON = 1e-6


def advantages_of(rewards: np.ndarray, groups: np.ndarray, kind: str) -> np.ndarray:
    """Return (R - mean) / (std + 1e-6) of each response: [n] float64. GRPO, arXiv:2402.03300.

    Args:
        rewards: [n] float64.
        groups: [n] int, the prompt of each.
        kind: distill.advantage. group: mean and standard deviation (with divisor n) of the responses of the same
            prompt. batch: of all. none: the rewards themselves.
    """
    if kind == "none":
        return rewards
    _, own = np.unique(groups if kind == "group" else np.zeros_like(groups), return_inverse=True)
    n = np.bincount(own)
    centered = rewards - (np.bincount(own, rewards) / n)[own]
    std = np.sqrt(np.bincount(own, centered**2) / n)
    advantages: np.ndarray = centered / (std[own] + _EPSILON)
    return advantages


def with_advantages(batch: Sequence[ScoredChunk], weights: Sequence[float], kind: str, n: int) -> list[ScoredChunk]:
    """Return a whole batch with the advantage of each sequence; 0 for dataset responses, which are not judged.

    Args:
        weights: of the functions.
        n: rollout.n; a sequence's index divided by it identifies its prompt.
    """
    judged = [chunk for chunk in batch if chunk.rewards is not None]
    if not judged:
        return [replace(chunk, advantages=np.zeros(chunk.rollouts.n_sequences, np.float32)) for chunk in batch]
    rewards = np.concatenate([total_rewards(chunk, weights) for chunk in judged])
    groups = np.concatenate([chunk.rollouts.sample_index for chunk in judged]) // n
    values = advantages_of(rewards, groups, kind).astype(np.float32)
    ends = np.cumsum([chunk.rollouts.n_sequences for chunk in judged])
    parts = iter(np.split(values, ends[:-1]))
    return [
        replace(
            chunk,
            advantages=np.zeros(chunk.rollouts.n_sequences, np.float32) if chunk.rewards is None else next(parts),
        )
        for chunk in batch
    ]


def total_rewards(chunk: ScoredChunk, weights: Sequence[float]) -> np.ndarray:
    """Return the weighted sum of the functions for each sequence of a judged chunk: [n_sequences] float64."""
    assert chunk.rewards is not None
    total: np.ndarray = chunk.rewards @ np.asarray(weights, np.float64)
    return total
