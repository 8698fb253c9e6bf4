"""Endless, reproducible and resumable order of the training prompts.

The order is the concatenation of one permutation per epoch. A batch is a slice of it and may span two epochs, so no
prompt is dropped. The order depends only on the seed; callers keep track of their position. With data.domain_shares
each route has an order of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from gkd.config.schema import Config
from gkd.types import Prompt


class PromptSampler:
    """Return prompts by their position in the training order.

    Args:
        prompts: all training prompts, in file order.
        shuffle: a new permutation each epoch, from (seed, epoch); False = file order.
    """

    def __init__(self, prompts: Sequence[Prompt], *, shuffle: bool, seed: int) -> None:
        self._prompts = prompts
        self._shuffle = shuffle
        self._seed = seed
        self._cached = (-1, np.arange(0))  # cache: (epoch, its order)

    def take(self, start: int, count: int) -> list[Prompt]:
        """Return the prompts at positions [start, start + count) of the order."""
        prompts: list[Prompt] = []
        while len(prompts) < count:
            epoch, offset = divmod(start + len(prompts), len(self._prompts))
            prompts += [self._prompts[i] for i in self._order(epoch)[offset : offset + count - len(prompts)]]
        return prompts

    def _order(self, epoch: int) -> np.ndarray:
        if not self._shuffle:
            return np.arange(len(self._prompts))
        if self._cached[0] != epoch:
            self._cached = epoch, np.random.default_rng([self._seed, epoch]).permutation(len(self._prompts))
        return self._cached[1]


class RouteSampler(PromptSampler):
    """Return prompts of each route by its share of the positions: data.domain_shares.

    After s batches each route but the one with the largest share has had exactly floor(s * share * batch_size) prompts,
    and that one the rest.

    Args:
        prompts: of all routes, in file order; each route has one.
        shares: by route, > 0; only their ratios count.
    """

    def __init__(
        self, prompts: Sequence[Prompt], shares: Sequence[float], batch_size: int, *, shuffle: bool, seed: int
    ) -> None:
        super().__init__(prompts, shuffle=shuffle, seed=seed)
        exact = [Fraction(repr(share)) for share in shares]
        self._each = [share / sum(exact) * batch_size for share in exact]
        self._largest = int(np.argmax(shares))
        self._size = batch_size
        self._places: tuple[int, list[tuple[int, int]]] = (-1, [])  # cache: (batch, result of `_batch`)
        by_route = [[p for p in prompts if p.route == route] for route in range(len(shares))]
        self._orders = [PromptSampler(route_prompts, shuffle=shuffle, seed=seed) for route_prompts in by_route]

    def take(self, start: int, count: int) -> list[Prompt]:
        prompts = []
        for position in range(start, start + count):
            batch, index = divmod(position, self._size)
            if self._places[0] != batch:
                self._places = batch, self._batch(batch)
            route, place = self._places[1][index]
            prompts += self._orders[route].take(place, 1)
        return prompts

    def _batch(self, batch: int) -> list[tuple[int, int]]:
        """Return the route of each position, and how many positions before it have the same route."""
        before = self._counts(batch)
        after = self._counts(batch + 1)
        routes = np.repeat(np.arange(len(before)), np.subtract(after, before))
        numbered = []
        for route in np.random.default_rng([self._seed, batch, _ROUTES]).permutation(routes).tolist():
            numbered.append((route, before[route]))
            before[route] += 1
        return numbered

    def _counts(self, batch: int) -> list[int]:
        counts = [int(batch * per_batch) for per_batch in self._each]
        counts[self._largest] += batch * self._size - sum(counts)
        return counts


def make_sampler(config: Config, prompts: Sequence[Prompt]) -> PromptSampler:
    """Return the order that the settings select."""
    data = config.data
    if not data.domain_shares:
        return PromptSampler(prompts, shuffle=data.shuffle, seed=data.seed)
    by_route = [share for _, share in sorted(data.domain_shares.items())]
    size = config.trainer.global_batch_size
    return RouteSampler(prompts, by_route, size, shuffle=data.shuffle, seed=data.seed)


# They separate these permutations from those of the epochs, which are drawn from (seed, epoch).
_STREAM = 1
_ROUTES = 2


def on_policy_indices(step: int, batch_size: int, share: float, seed: int) -> list[int]:
    """Return the indices in batch number `step` of the prompts that are on-policy (GKD's lambda).

    An on-policy prompt contributes `rollout.n` sampled responses, another prompt one dataset response. The paper
    (arXiv:2306.13649, algorithm 1) draws once for a whole batch. Here each batch is a mixture, which depends only on
    the step number, so resuming preserves it.

    Args:
        step: number of optimizer steps before this batch.
        share: `distill.on_policy_share`, in [0, 1]; 1 selects every index, 0 none.
        seed: `data.seed`; (seed, step) determines the indices.

    Returns:
        Ascending; floor((step + 1) * share * batch_size) - floor(step * share * batch_size) of them.
    """
    # Exact decimal: in floating point, 0.29 * 100 prompts would be 28.
    per_step = Fraction(repr(share)) * batch_size
    count = int((step + 1) * per_step) - int(step * per_step)
    indices = np.random.default_rng([seed, step, _STREAM]).permutation(batch_size)[:count]
    return sorted(indices.tolist())
