"""Endless, reproducible and resumable order of the training prompts.

The order is the concatenation of one permutation per epoch. A batch is a slice of it and may span two epochs, so no
prompt is dropped. The order depends only on the seed; callers keep track of their position. With data.domain_shares
each route has an order of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gkd.config.schema import Config
from gkd.data.mixing import RouteShares
from gkd.types import Prompt


class PromptSampler:
    """Return prompts by their position in the training order.

    Args:
        prompts: all training prompts, in file order.
        shuffle: a new permutation each epoch, from (seed, epoch); False = file order.
    """

    def __init__(self, prompts: Sequence[Prompt], *, shuffle: bool, seed: int) -> None:
        self._prompts, self._shuffle, self._seed = prompts, shuffle, seed
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
    """Return prompts of each route by its share of the positions.

    Args:
        prompts: of all routes, in file order; each route has one.
        shares: route of each position.
    """

    def __init__(self, prompts: Sequence[Prompt], *, shuffle: bool, seed: int, shares: RouteShares) -> None:
        super().__init__(prompts, shuffle=shuffle, seed=seed)
        own = [[p for p in prompts if p.route == route] for route in range(shares.n_routes)]
        self._shares, self._orders = shares, [PromptSampler(each, shuffle=shuffle, seed=seed) for each in own]

    def take(self, start: int, count: int) -> list[Prompt]:
        places = [self._shares.at(position) for position in range(start, start + count)]
        return [self._orders[route].take(place, 1)[0] for route, place in places]


def make_sampler(config: Config, prompts: Sequence[Prompt]) -> PromptSampler:
    """Return the order that the settings select."""
    data = config.data
    if not data.domain_shares:
        return PromptSampler(prompts, shuffle=data.shuffle, seed=data.seed)
    by_route = [share for _, share in sorted(data.domain_shares.items())]
    shares = RouteShares(by_route, config.trainer.global_batch_size, data.seed)
    return RouteSampler(prompts, shuffle=data.shuffle, seed=data.seed, shares=shares)
