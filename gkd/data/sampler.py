"""Which prompts are trained on, in which order: endless, reproducible, resumable.

The order is the epochs' permutations one after another; a batch is a slice of it and may straddle two epochs, so no
prompt is dropped. It follows from the seed alone: whoever asks says from which position, and keeps count of what was
trained on.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gkd.types import Prompt


class PromptSampler:
    """The order of the prompts.

    Args:
        prompts: all training prompts, in file order.
        shuffle: a new permutation each epoch, from (seed, epoch); False = file order.
    """

    def __init__(self, prompts: Sequence[Prompt], *, shuffle: bool, seed: int) -> None:
        self._prompts, self._shuffle, self._seed = prompts, shuffle, seed
        self._newest = (-1, np.arange(0))  # epoch and its order: the next question is mostly about the same

    def take(self, start: int, count: int) -> list[Prompt]:
        """The prompts at positions start to start + count of the order."""
        taken: list[Prompt] = []
        while len(taken) < count:
            epoch, offset = divmod(start + len(taken), len(self._prompts))
            taken += [self._prompts[i] for i in self._order(epoch)[offset : offset + count - len(taken)]]
        return taken

    def _order(self, epoch: int) -> np.ndarray:
        if not self._shuffle:
            return np.arange(len(self._prompts))
        if self._newest[0] != epoch:
            self._newest = epoch, np.random.default_rng([self._seed, epoch]).permutation(len(self._prompts))
        return self._newest[1]
