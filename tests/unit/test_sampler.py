"""The prompt order, complete and resumable, and the exact share of on-policy prompts."""

from __future__ import annotations

import math
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gkd.data.sampler import PromptSampler, on_policy_indices
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


PERCENT = st.integers(0, 100)


@given(percent=PERCENT, batch_size=st.integers(1, 40), seed=st.integers(0, 2**40), steps=st.integers(1, 30))
def test_after_any_number_of_steps_the_share_is_exact(percent: int, batch_size: int, seed: int, steps: int) -> None:
    """Fails if distill.on_policy_share is only approximate, or depends on floating-point rounding."""
    total = 0
    for step in range(steps):
        indices = on_policy_indices(step, batch_size, percent / 100, seed)
        assert indices == sorted(set(indices))
        assert all(0 <= index < batch_size for index in indices)
        total += len(indices)
        assert total == math.floor((step + 1) * Fraction(percent, 100) * batch_size)


def test_the_selection_is_uniform_and_depends_on_seed_and_step() -> None:
    """Fails if some data-parallel groups get more dataset responses than others, or data.seed has no effect."""
    drawn = [on_policy_indices(step, 8, 0.25, 1) for step in range(400)]
    counts = np.bincount([index for indices in drawn for index in indices], minlength=8)
    assert counts.sum() == 800
    assert counts.min() > 60 and counts.max() < 140  # 100 expected, standard deviation 8.7
    assert drawn != [on_policy_indices(step, 8, 0.25, 2) for step in range(400)]


def test_the_selection_is_independent_of_the_prompt_order() -> None:
    """Fails if an epoch of one batch uses the same permutation for the order and the selection."""
    prompts = [Prompt(i, np.array([i], np.int32)) for i in range(16)]
    sampler = PromptSampler(prompts, shuffle=True, seed=4)
    order = [prompt.prompt_id for prompt in sampler.take(0, 16)]
    assert on_policy_indices(0, 16, 0.5, 4) != sorted(order[:8])
