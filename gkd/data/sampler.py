"""Endless, reproducible and resumable order of the training prompts.

The order is the concatenation of one permutation per epoch. A batch is a slice of it and may span two epochs, so no
prompt is dropped. The order depends only on the seed; callers keep track of their position.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

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
