"""Which prompts the next step takes: an endless, reproducible, resumable order.

The order is the epochs' permutations one after another; a batch is the next slice of it and may
straddle two epochs, so no prompt is dropped. Its whole state is one number, the position, and
`peek` does not move it: the trainer commits a batch only when it has been trained on, so a crash in
between repeats that batch instead of losing it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gkd.types import Prompt


class PromptSampler:
    """Batches of `batch_size` prompts.

    Args:
        prompts: all training prompts, in file order.
        batch_size: prompts a step.
        shuffle: a new permutation each epoch, from (seed, epoch); False = file order.
        position: prompts already trained on.
    """

    def __init__(
        self, prompts: Sequence[Prompt], batch_size: int, *, shuffle: bool, seed: int, position: int = 0
    ) -> None:
        self._prompts, self._batch_size, self._shuffle, self._seed = prompts, batch_size, shuffle, seed
        self.position = position

    def peek(self) -> list[Prompt]:
        """The next batch, without taking it."""
        batch: list[Prompt] = []
        position = self.position
        while len(batch) < self._batch_size:
            epoch, offset = divmod(position, len(self._prompts))
            take = self._order(epoch)[offset : offset + self._batch_size - len(batch)]
            batch += [self._prompts[i] for i in take]
            position += len(take)
        return batch

    def commit(self) -> None:
        """The batch that `peek` shows has been trained on."""
        self.position += self._batch_size

    def _order(self, epoch: int) -> np.ndarray:
        if not self._shuffle:
            return np.arange(len(self._prompts))
        return np.random.default_rng([self._seed, epoch]).permutation(len(self._prompts))
