"""The prompt order: complete, reproducible, resumable."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from gkd.sampler import PromptSampler
from gkd.types import Prompt

PROMPTS = [Prompt(i, np.array([i], np.int32)) for i in range(10)]


def take(sampler: PromptSampler, n: int) -> list[list[int]]:
    batches = []
    for _ in range(n):
        batches.append([p.prompt_id for p in sampler.peek()])
        sampler.commit()
    return batches


@pytest.mark.parametrize("shuffle", [True, False])
def test_every_epoch_has_every_prompt_once_although_batches_straddle(shuffle: bool) -> None:
    """If it fails, prompts are dropped or repeated within an epoch."""
    flat = [i for batch in take(PromptSampler(PROMPTS, 4, shuffle=shuffle, seed=3), 5) for i in batch]
    assert Counter(flat) == {i: 2 for i in range(10)}
    assert Counter(flat[:10]) == {i: 1 for i in range(10)}
    if shuffle:
        assert flat[:10] != flat[10:]
    else:
        assert flat[:10] == list(range(10))


def test_a_resumed_sampler_goes_on_exactly_there() -> None:
    """If it fails, a resumed run repeats or loses prompts."""
    whole = take(PromptSampler(PROMPTS, 3, shuffle=True, seed=5), 9)
    first = PromptSampler(PROMPTS, 3, shuffle=True, seed=5)
    begun = take(first, 4)
    assert begun + take(PromptSampler(PROMPTS, 3, shuffle=True, seed=5, position=first.position), 5) == whole


def test_peek_takes_nothing() -> None:
    """If it fails, a batch whose step failed is lost instead of repeated."""
    sampler = PromptSampler(PROMPTS, 4, shuffle=True, seed=1)
    assert [p.prompt_id for p in sampler.peek()] == [p.prompt_id for p in sampler.peek()]


def test_the_seed_decides_the_order() -> None:
    """If it fails, data.seed does nothing."""
    orders = {str(take(PromptSampler(PROMPTS, 10, shuffle=True, seed=s), 1)) for s in range(4)}
    assert len(orders) == 4


def test_a_batch_may_be_larger_than_the_file() -> None:
    """If it fails, a small file with a large global_batch_size hangs or comes out short."""
    (batch,) = take(PromptSampler(PROMPTS, 23, shuffle=True, seed=1), 1)
    assert len(batch) == 23
    assert max(Counter(batch).values()) == 3
