"""Even out the tokens of data-parallel groups (or ranks) by moving sequences between them.

A training step takes as long as its heaviest group. The prompt index decides which group a sequence is generated and
scored for; once all lengths are known, a few sequences move from heavy groups to light ones. The loss is a token mean
over the global batch, so it does not depend on which group computes which part of it.

The weight of a sequence is its tokens, prompt and response; the quadratic cost of attention is neglected.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

# The heaviest group may exceed the mean by this share: below it, another move costs more than it gains.
TOLERANCE = 0.01


def even_groups(samples: Sequence[np.ndarray], lengths: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Move sequences until no group has more than 1 + TOLERANCE times the mean, or no move or exchange helps.

    The result does not depend on the order of the sequences in a group. What two groups have above and below the mean
    moves in few, long sequences at once; single moves and exchanges follow. A group that has a sequence keeps at least
    one, and an empty group gets one if another group has two.

    Args:
        samples: by group, [n] int32, identifiers of its sequences: unique over all groups.
        lengths: by group, [n] their tokens, same order.

    Returns:
        By group, the samples that it has afterwards, ascending.
    """
    groups = [_Group(s, n) for s, n in zip(samples, lengths, strict=True)]
    mean = sum(g.total for g in groups) / len(groups)
    while True:
        heavy, *_ = by_weight = sorted(groups, key=lambda g: -g.total)  # stable: ties in the order of the groups
        light = by_weight[-1]
        if len(light.keys) == 0:
            donor = next((g for g in by_weight if len(g.keys) > 1), None)
            if donor is None:
                break
            donor.give(light, donor.nearest((donor.total - light.total) / 2))
        elif heavy.total <= (1 + TOLERANCE) * mean:
            break
        elif heavy.give_longest(light, min(heavy.total - mean, mean - light.total)):
            continue
        elif not any(_relieve(heavy, other) for other in reversed(by_weight[1:])):
            break
    return [np.sort(g.samples) for g in groups]


class _Group:
    """One group's sequences, shortest first; ties ordered by sample."""

    def __init__(self, samples: np.ndarray, lengths: np.ndarray) -> None:
        self._set(np.sort(lengths.astype(np.int64) << 32 | samples))

    def _set(self, keys: np.ndarray) -> None:
        self.keys, self.lengths = keys, keys >> 32
        self.total = int(self.lengths.sum())

    @property
    def samples(self) -> np.ndarray:
        return (self.keys & 0xFFFFFFFF).astype(np.int32)

    def nearest(self, length: float) -> int:
        """Return the index of the sequence whose length is nearest; of several, the first."""
        return int(self.all_nearest(np.array([length]))[0])

    def all_nearest(self, lengths: np.ndarray) -> np.ndarray:
        """Return `nearest` of each length."""
        above = np.searchsorted(self.lengths, lengths).clip(1, max(1, len(self.lengths) - 1))
        below = above - 1
        above = above.clip(max=len(self.lengths) - 1)
        is_below = lengths - self.lengths[below] <= self.lengths[above] - lengths
        return np.searchsorted(self.lengths, self.lengths[np.where(is_below, below, above)])

    def give(self, other: _Group, index: int | slice) -> None:
        """Move the sequences at `index` to the other group."""
        moved = np.atleast_1d(self.keys[index])
        self._set(np.delete(self.keys, index))
        other._set(np.sort(np.concatenate((other.keys, moved)), kind="stable"))  # fast: two sorted parts

    def give_longest(self, other: _Group, tokens: float) -> bool:
        """Move the longest sequences, as many as have at most these tokens together; return False if there are none."""
        n = int(np.searchsorted(self.lengths[:0:-1].cumsum(), tokens, "right"))  # the shortest one stays
        if n:
            self.give(other, slice(len(self.keys) - n, None))
        return n > 0


def _relieve(heavy: _Group, light: _Group) -> bool:
    """Make the move, or else the exchange, that leaves the two groups most alike; return False if none helps.

    Moving d tokens makes a gap of g tokens |g - 2 d|, which is smaller exactly if 0 < d < g.
    """
    gap = heavy.total - light.total
    single = heavy.nearest(gap / 2)
    moved = int(heavy.lengths[single])
    # An exchange costs two moves, so it must leave less than half of the gap that a single move leaves.
    best, exchange = (abs(gap - 2 * moved) / 2 if 0 < moved < gap else float(gap)), None
    if len(light.lengths):
        given = heavy.all_nearest(light.lengths + gap / 2)
        net = heavy.lengths[given] - light.lengths
        left = np.where((net > 0) & (net < gap), np.abs(gap - 2 * net), np.inf)
        returned = int(left.argmin())
        if left[returned] < best:
            exchange = int(given[returned]), returned
    if exchange is not None:
        index, returned = exchange
        key = light.keys[returned]
        heavy.give(light, index)
        light.give(heavy, int(np.searchsorted(light.keys, key)))
        return True
    if 0 < moved < gap:
        heavy.give(light, single)
        return True
    return False
