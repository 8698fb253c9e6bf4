"""Selection of on-policy prompts: exact counts, stateless, independent of the prompt order."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gkd.data.sampler import PromptSampler, on_policy_indices
from gkd.types import Prompt

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


@given(percent=PERCENT, seed=st.integers(0, 1000), step=st.integers(0, 10**6))
def test_the_selection_depends_only_on_the_step(percent: int, seed: int, step: int) -> None:
    """Fails if a resumed run selects other prompts than an uninterrupted one."""
    first = on_policy_indices(step, 32, percent / 100, seed)
    on_policy_indices(step + 1, 32, 0.5, seed)
    np.random.default_rng(0).random()
    assert on_policy_indices(step, 32, percent / 100, seed) == first


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


def test_the_ends_of_the_range() -> None:
    """Fails if a share of 1 selects fewer than all prompts, or a share of 0 selects some."""
    for step in range(5):
        assert on_policy_indices(step, 7, 1.0, 3) == list(range(7))
        assert on_policy_indices(step, 7, 0.0, 3) == []
