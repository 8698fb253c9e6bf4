"""The prompt order, complete and resumable, and the exact share of on-policy prompts."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gkd.data.sampler import PromptSampler, on_policy_indices
from gkd.types import Prompt

PROMPTS = [Prompt(i, np.array([i], np.int32)) for i in range(12)]


def ids(sampler: PromptSampler, start: int, count: int) -> list[int]:
    return [p.prompt_id for p in sampler.take(start, count)]


@given(st.integers(1, 12), st.booleans(), st.integers(0, 2**40), st.lists(st.integers(0, 40), max_size=4))
def test_every_epoch_has_every_prompt_once(n: int, shuffle: bool, seed: int, starts: list[int]) -> None:
    """Fails if prompts are dropped or repeated within an epoch, or the order depends on earlier calls, so that a
    resumed run repeats or loses some.
    """
    whole = ids(PromptSampler(PROMPTS[:n], shuffle=shuffle, seed=seed), 0, 6 * n + 70)
    sampler = PromptSampler(PROMPTS[:n], shuffle=shuffle, seed=seed)
    for start in (40, *starts):
        assert ids(sampler, start, 25) == whole[start : start + 25]
    epochs = [whole[i : i + n] for i in range(0, 6 * n, n)]
    assert all(sorted(epoch) == list(range(n)) for epoch in epochs)
    assert shuffle or epochs == [list(range(n))] * 6
    assert not shuffle or n < 6 or any(epoch != epochs[0] for epoch in epochs)


def test_the_seed_decides_the_order() -> None:
    """Fails if data.seed has no effect."""
    assert len({str(ids(PromptSampler(PROMPTS, shuffle=True, seed=s), 0, 10)) for s in range(4)}) == 4


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
    order = [prompt.prompt_id for prompt in PromptSampler(prompts, shuffle=True, seed=4).take(0, 16)]
    assert on_policy_indices(0, 16, 0.5, 4) != sorted(order[:8])
