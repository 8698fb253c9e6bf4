"""Chunks of rollouts without rollouts, for tests of what reads only their sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gkd.types import RolloutChunk


def chunk_of(
    samples: Sequence[int] | np.ndarray,
    n_response: int | Sequence[int] | np.ndarray = 1,
    *,
    n_prompt: int = 1,
    n_truncated: int = 0,
    version: int | Sequence[int] = 0,
    n_repeated: int = 0,
    dp_rank: int = 0,
    ref: Any = None,
    on_policy: bool = True,
) -> RolloutChunk:
    """Return a chunk of these samples.

    Args:
        n_response: response tokens of each, or of all.
        n_prompt: prompt tokens of each.
        n_truncated: the first ones.
        version: of each, or of all.
        n_repeated: repeated 4-grams of each.
    """
    sizes = np.zeros((8, len(samples)), np.int32)
    sizes[0], sizes[2], sizes[4], sizes[5] = samples, n_response, version, n_repeated
    sizes[1] = sizes[2] + n_prompt
    sizes[3, :n_truncated], sizes[7] = 1, 1
    return RolloutChunk(dp_rank, ref, sizes, on_policy)
