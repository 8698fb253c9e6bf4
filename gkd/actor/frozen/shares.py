"""A rank's share of some chunks of rollouts, worked on as one batch: the other end of `gkd.teacher.local.deal`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from gkd.types import Rollout

T = TypeVar("T")


def by_chunk(
    takes: Sequence[bytes], chunks: Sequence[list[Rollout]], work: Callable[[list[Rollout]], Sequence[T]]
) -> list[list[T]]:
    """By chunk, what `work` makes of those sequences of it that this rank takes; it is called once, with all of them.

    Args:
        takes: their places in each chunk, int32.
    """
    chosen = [[chunk[i] for i in np.frombuffer(take, "<i4")] for take, chunk in zip(takes, chunks, strict=True)]
    made = iter(work([rollout for part in chosen for rollout in part]))
    return [[next(made) for _ in part] for part in chosen]
