"""Weigh the loss of each sequence's tokens, so that the token mean of a global batch is the mean of distill.normalize.

The loss of a step is (1 / N) sum over tokens of c l. With w = the weight of the token's route

    token      c = w
    sequence   c = w N / (S M)     mean over sequences of the mean over tokens
    domain     c = w N / N_d       sum over routes d of w_d (1 / N_d) sum over the tokens of d

N own tokens and S sequences of the global batch, M own tokens of the sequence, N_d own tokens of its route in the
global batch. So the result depends neither on data-parallel groups nor on micro-batches, packing or pipeline stages.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gkd.config.routes import Route
from gkd.types import Rollout


def count(rollouts: Sequence[Rollout], n_routes: int) -> np.ndarray:
    """Return the own tokens and the sequences of each route: [n_routes, 2] float64, to be summed over groups."""
    counts = np.zeros((n_routes, 2))
    for rollout in rollouts:
        counts[rollout.route] += rollout.n_own, 1
    return counts


def sequence_weights(
    rollouts: Sequence[Rollout], counts: np.ndarray, routes: Sequence[Route], normalize: str
) -> np.ndarray:
    """Return the factor c of each sequence: [n] float32.

    Args:
        rollouts: of this rank.
        counts: [n_routes, 2], of the global batch, see `count`.
        normalize: distill.normalize.
    """
    n_tokens, n_sequences = counts.sum(axis=0)
    weights = np.array([routes[rollout.route].weight for rollout in rollouts])
    if normalize == "sequence":
        weights *= n_tokens / (n_sequences * np.array([rollout.n_own for rollout in rollouts]))
    if normalize == "domain":
        weights *= n_tokens / counts[[rollout.route for rollout in rollouts], 0]
    return weights.astype(np.float32)


def size_numbers(counts: np.ndarray, routes: Sequence[Route]) -> dict[str, float]:
    """Return the share of the tokens and the mean response length of each route; nothing for a single teacher."""
    numbers = {}
    for route, (n_tokens, n_sequences) in zip(routes, counts.tolist(), strict=True):
        if route.name:
            numbers[f"domain/{route.name}/tokens_share"] = n_tokens / counts[:, 0].sum()
            if n_sequences:
                numbers[f"domain/{route.name}/length"] = n_tokens / n_sequences
    return numbers
