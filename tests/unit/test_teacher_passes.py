"""Grouping of a batch into forward passes of the Transformers engine on CPU."""

from __future__ import annotations

import numpy as np
import pytest

from teacher_server.engines.hf import _passes


@pytest.mark.parametrize("limit", [1, 64, 512, 100_000])
def test_passes_are_within_the_limit_and_lose_nothing(limit: int) -> None:
    """Fails if a sequence is computed twice or never, or short sequences are padded to long ones beyond the limit."""
    lengths = np.random.default_rng(0).geometric(1 / 40, 300).tolist()
    passes = list(_passes(dict(enumerate(lengths)), limit))
    assert sorted(i for group in passes for i in group) == list(range(300))
    assert all(len(group) == 1 or len(group) * max(lengths[i] for i in group) <= limit for group in passes)
    padded = sum(len(group) * max(lengths[i] for i in group) for group in passes)
    assert limit > 512 or padded <= 1.25 * sum(lengths)


def test_without_a_limit_all_sequences_share_a_pass() -> None:
    """Fails if a GPU runs several passes for one batch."""
    assert list(_passes({0: 5, 1: 1, 2: 900}, None)) == [[0, 1, 2]]
