"""Which prompts are on-policy: exact counts, no memory, no pattern shared with the prompt order."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gkd.data.mixing import on_policy_indices
from gkd.data.sampler import PromptSampler
from gkd.types import Prompt

PERCENT = st.integers(0, 100)


@given(percent=PERCENT, batch_size=st.integers(1, 40), seed=st.integers(0, 2**40), steps=st.integers(1, 30))
def test_after_any_number_of_steps_the_share_is_exact(percent: int, batch_size: int, seed: int, steps: int) -> None:
    """If it fails, distill.on_policy_share is only roughly kept, or a float's last digit moves a prompt."""
    total = 0
    for step in range(steps):
        places = on_policy_indices(step, batch_size, percent / 100, seed)
        assert places == sorted(set(places))
        assert all(0 <= place < batch_size for place in places)
        total += len(places)
        assert total == math.floor((step + 1) * Fraction(percent, 100) * batch_size)


@given(percent=PERCENT, seed=st.integers(0, 1000), step=st.integers(0, 10**6))
def test_the_step_number_alone_decides(percent: int, seed: int, step: int) -> None:
    """If it fails, a resumed run splits its batches otherwise than the run that was stopped."""
    first = on_policy_indices(step, 32, percent / 100, seed)
    on_policy_indices(step + 1, 32, 0.5, seed)
    np.random.default_rng(0).random()
    assert on_policy_indices(step, 32, percent / 100, seed) == first


def test_every_place_has_its_turn_and_seed_and_step_matter() -> None:
    """If it fails, some data-parallel group always gets the dataset's responses, or data.seed does nothing."""
    drawn = [on_policy_indices(step, 8, 0.25, 1) for step in range(400)]
    counts = np.bincount([place for places in drawn for place in places], minlength=8)
    assert counts.sum() == 800
    assert counts.min() > 60 and counts.max() < 140  # 100 expected, standard deviation 8.7
    assert drawn != [on_policy_indices(step, 8, 0.25, 2) for step in range(400)]


def test_the_split_is_not_the_prompt_order_again() -> None:
    """If it fails, with as many prompts as places both draws are one permutation, and who is on-policy is no chance."""
    prompts = [Prompt(i, np.array([i], np.int32)) for i in range(16)]
    sampler = PromptSampler(prompts, shuffle=True, seed=4)
    order = [prompt.prompt_id for prompt in sampler.take(0, 16)]
    assert on_policy_indices(0, 16, 0.5, 4) != sorted(order[:8])


def test_the_ends_of_the_range() -> None:
    """If it fails, the default reads the dataset's responses, or a run without rollouts makes some."""
    for step in range(5):
        assert on_policy_indices(step, 7, 1.0, 3) == list(range(7))
        assert on_policy_indices(step, 7, 0.0, 3) == []
