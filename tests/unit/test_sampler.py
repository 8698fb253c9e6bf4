"""The prompt order: complete, reproducible, resumable."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from gkd.data.sampler import PromptSampler
from gkd.types import Prompt

PROMPTS = [Prompt(i, np.array([i], np.int32)) for i in range(10)]


def ids(sampler: PromptSampler, start: int, count: int) -> list[int]:
    return [p.prompt_id for p in sampler.take(start, count)]


@pytest.mark.parametrize("shuffle", [True, False])
def test_every_epoch_has_every_prompt_once_even_if_batches_span_epochs(shuffle: bool) -> None:
    """Fails if prompts are dropped or repeated within an epoch."""
    sampler = PromptSampler(PROMPTS, shuffle=shuffle, seed=3)
    flat = [i for batch in range(5) for i in ids(sampler, 4 * batch, 4)]
    assert Counter(flat) == {i: 2 for i in range(10)}
    assert Counter(flat[:10]) == {i: 1 for i in range(10)}
    if shuffle:
        assert flat[:10] != flat[10:]
    else:
        assert flat[:10] == list(range(10))


def test_the_order_depends_only_on_the_seed() -> None:
    """Fails if a resumed run repeats or loses prompts, or the order depends on earlier calls."""
    whole = ids(PromptSampler(PROMPTS, shuffle=True, seed=5), 0, 47)
    sampler = PromptSampler(PROMPTS, shuffle=True, seed=5)
    for start in (40, 3, 19, 20, 9):
        assert ids(sampler, start, 7) == whole[start : start + 7]


def test_the_seed_decides_the_order() -> None:
    """Fails if data.seed has no effect."""
    orders = {str(ids(PromptSampler(PROMPTS, shuffle=True, seed=s), 0, 10)) for s in range(4)}
    assert len(orders) == 4


def test_a_batch_may_be_larger_than_the_file() -> None:
    """Fails if a batch larger than the file hangs or is incomplete."""
    batch = ids(PromptSampler(PROMPTS, shuffle=True, seed=1), 0, 23)
    assert len(batch) == 23
    assert max(Counter(batch).values()) == 3
