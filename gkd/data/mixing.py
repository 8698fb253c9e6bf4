"""Divide the prompts of a batch: by route, and into on-policy and dataset responses.

GKD's lambda: select the on-policy prompts of a batch; the others use the dataset's response.

The paper (arXiv:2306.13649, algorithm 1) draws once for a whole batch. Here each batch is a mixture: after s steps,
exactly floor(s * share * batch_size) prompts have been on-policy. An on-policy prompt contributes `rollout.n` sampled
responses, another prompt one dataset response. The selection depends only on the step number, so resuming preserves it.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import numpy as np

# Separate these permutations from the permutations of `gkd.data.sampler`, which are drawn from (seed, epoch).
_STREAM, _ROUTES = 1, 2


def on_policy_indices(step: int, batch_size: int, share: float, seed: int) -> list[int]:
    """Return the indices in batch number `step` of the prompts that are on-policy.

    Args:
        step: number of optimizer steps before this batch.
        share: `distill.on_policy_share`, in [0, 1]; 1 selects every index, 0 none.
        seed: `data.seed`; (seed, step) determines the indices.

    Returns:
        Ascending; floor((step + 1) * share * batch_size) - floor(step * share * batch_size) of them.
    """
    # Exact decimal: in floating point, 0.29 * 100 prompts would be 28.
    each = Fraction(repr(share)) * batch_size
    count = int((step + 1) * each) - int(step * each)
    indices = np.random.default_rng([seed, step, _STREAM]).permutation(batch_size)[:count]
    return sorted(indices.tolist())


class RouteShares:
    """Assign a route to each position of the training order: data.domain_shares.

    After s batches each route but the one with the largest share has had exactly floor(s * share * batch_size) prompts,
    and that one the rest.

    Args:
        shares: by route, > 0; only their ratios count.
    """

    def __init__(self, shares: Sequence[float], batch_size: int, seed: int) -> None:
        total = sum(Fraction(repr(share)) for share in shares)
        self._each = [Fraction(repr(share)) / total * batch_size for share in shares]
        self._largest, self._size, self._seed = int(np.argmax(shares)), batch_size, seed
        self._cached: tuple[int, list[tuple[int, int]]] = (-1, [])

    @property
    def n_routes(self) -> int:
        return len(self._each)

    def at(self, position: int) -> tuple[int, int]:
        """Return the route of a position, and how many positions before it have the same route."""
        batch, index = divmod(position, self._size)
        if self._cached[0] != batch:
            self._cached = batch, self._batch(batch)
        return self._cached[1][index]

    def _batch(self, batch: int) -> list[tuple[int, int]]:
        before, after = self._counts(batch), self._counts(batch + 1)
        routes = np.repeat(np.arange(len(before)), np.subtract(after, before))
        mixed = np.random.default_rng([self._seed, batch, _ROUTES]).permutation(routes).tolist()
        numbered = []
        for route in mixed:
            numbered.append((route, before[route]))
            before[route] += 1
        return numbered

    def _counts(self, batch: int) -> list[int]:
        counts = [int(batch * each) for each in self._each]
        counts[self._largest] += batch * self._size - sum(counts)
        return counts
