"""The estimated step times of the split tuner: against sums and maxima from the rates, and limits of its formulas."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gkd.tools.split_tuner.splits import Rates, Sizes, Workload, estimate

BOUNDS = {"sync": 0, "one_step_off": 1, "two_step_off": 2, "stream": 1}
RATES = Rates(
    pass_s=0.01,
    sequence_s=0.001,
    prefill_s=1e-4,
    hand_over_s=0.002,
    batch_s=0.02,
    score_s=0.01,
    score_token_s=1e-4,
    train_s=0.1,
    train_token_s=2e-4,
    sync_s=0.05,
    other_s=0.01,
)
# Eight prompts of 10 tokens with one response of 100 tokens each: all lengths are equal.
WORK = Workload(8, 8.0, 1, 64, 10.0, 0.0, 100.0, 100.0, True)
SIZES = Sizes(dp=1, engines=1, workers=4)
ROLLOUT_S = 100 * (0.01 + 8 * 0.001) + 80 * 1e-4 + 8 * 0.002 + 0.02
SCORING_S = 2 * (0.01 + 110 * 1e-4)  # each of four workers scores two sequences
LAST_S = 0.01 + 110 * 1e-4  # the last response; the others have been scored by then


def step_s(scheduler: str, workload: Workload = WORK, rates: Rates = RATES, sizes: Sizes = SIZES) -> float:
    return estimate(scheduler, BOUNDS[scheduler], sizes, workload, rates).step_s


def test_sync_is_the_sum_and_the_others_are_the_longest() -> None:
    """Fails if a scheduler overlaps other stages than the loop does."""
    train_s = 0.1 + 880 * 2e-4
    assert step_s("sync") == pytest.approx(ROLLOUT_S + LAST_S + train_s + 0.06)
    assert step_s("one_step_off") == pytest.approx(max(ROLLOUT_S, train_s) + 0.06)
    assert step_s("two_step_off") == pytest.approx(max(ROLLOUT_S, train_s) + 0.06)
    slow = replace(RATES, train_token_s=1e-2)
    for scheduler in ("one_step_off", "two_step_off", "stream"):
        assert step_s(scheduler, rates=slow) == pytest.approx(0.1 + 880 * 1e-2 + 0.06)
    # With one step off the next step waits for late scores. With two steps off they arrive during training.
    late = replace(RATES, score_s=1.0, train_s=1.5)
    train_s, scoring_s = 1.5 + 880 * 2e-4, 2 * (1.0 + 110 * 1e-4)
    late_s = scoring_s - ROLLOUT_S / 2  # after the last response
    expected = (ROLLOUT_S + late_s - train_s - 0.06) / 2 + train_s + 0.06
    assert step_s("one_step_off", rates=late) == pytest.approx(expected)
    assert step_s("two_step_off", rates=late) == pytest.approx(scoring_s)
    parts = estimate("sync", 0, SIZES, WORK, late)
    assert (parts.rollout_s, parts.scoring_s, parts.training_s) == pytest.approx((ROLLOUT_S, scoring_s, train_s))


def test_a_full_stream_works_without_a_pause() -> None:
    """Fails if a stream whose engines always have work is charged for the end of each batch."""
    busy, rates = replace(WORK, max_num_seqs=8, early_parts=True), replace(RATES, prefill_s=0.0)
    expected = 100 * (0.01 + 8 * 0.001) + 8 * RATES.hand_over_s + RATES.sync_s
    assert step_s("stream", busy, rates) == pytest.approx(expected)


def test_the_staleness_bound_limits_a_stream() -> None:
    """Fails if a stream is predicted to run ahead of its longest response, which each step's bound waits for."""
    tail = replace(WORK, longest_tokens=1000.0, early_parts=True)
    rates = replace(RATES, sequence_s=0.0, prefill_s=0.0, hand_over_s=0.0, sync_s=0.0)
    for bound in (0, 1, 3):
        scoring_s = estimate("stream", bound, SIZES, tail, rates).scoring_s
        expected = (1000 * 0.01 + scoring_s / 3 + 0.1 + 0.01) / (bound + 1)
        assert estimate("stream", bound, SIZES, tail, rates).step_s == pytest.approx(expected)


def test_the_longest_response_decides_a_batch() -> None:
    """Fails if a batch takes the time of its mean length, or a queue in front of an engine takes none."""
    tail = replace(WORK, longest_tokens=300.0)
    assert step_s("two_step_off", tail) - step_s("two_step_off") == pytest.approx(200 * 0.01)
    queued = replace(
        WORK, max_num_seqs=2, longest_tokens=300.0
    )  # 400 passes of mean length, then the end of the longest
    assert step_s("two_step_off", queued) - step_s("two_step_off") == pytest.approx((400 + 200 - 100) * 0.01)
    split = estimate("sync", 0, Sizes(dp=8, engines=1, workers=8), tail, RATES)
    assert split.training_s == pytest.approx(0.1 + 310 * 2e-4), "no rank trains on less than the longest sequence"
    assert split.scoring_s == pytest.approx(0.01 + 310 * 1e-4)


def test_dataset_responses_cost_no_rollout() -> None:
    """Fails if prompts with the dataset's response occupy the engines, or are not trained on."""
    mixed = replace(WORK, n_on_policy=4.0, dataset_tokens=50.0)
    half = replace(WORK, n_prompts=4, n_on_policy=4.0)
    parts, of_half = (estimate("sync", 0, SIZES, workload, RATES) for workload in (mixed, half))
    assert parts.rollout_s == pytest.approx(of_half.rollout_s)
    assert parts.training_s - of_half.training_s == pytest.approx(4 * 60 * 2e-4)
    assert parts.scoring_s - of_half.scoring_s == pytest.approx(4 * (0.01 + 60 * 1e-4) / 4)


@given(
    st.sampled_from(sorted(BOUNDS)),
    st.integers(1, 200),
    st.sampled_from([1, 4]),
    st.integers(1, 64),
    st.floats(1.0, 20.0),
    st.booleans(),
    st.lists(st.floats(0.0, 1.0), min_size=11, max_size=11),
)
@settings(max_examples=150)
def test_more_gpus_and_faster_stages_never_make_a_slower_step(
    scheduler: str,
    n_prompts: int,
    n: int,
    max_num_seqs: int,
    tail: float,
    early: bool,
    rates: list[float],
) -> None:
    """Fails if the tool recommends to leave a GPU idle, or a rate of 0 is a division by zero."""
    work = Workload(n_prompts, float(n_prompts), n, max_num_seqs, 10.0, 0.0, 50.0, 50.0 * tail, early)
    measured = Rates(*rates)
    sizes = Sizes(2, 3, 2)
    slowest = estimate(scheduler, BOUNDS[scheduler], sizes, work, measured)
    assert np.isfinite(slowest.step_s) and slowest.step_s >= max(slowest.scoring_s, slowest.training_s) - 1e-9
    for more in (Sizes(4, 3, 2), Sizes(2, 6, 2), Sizes(2, 3, 4)):
        assert step_s(scheduler, work, measured, more) <= slowest.step_s * (1 + 1e-9)
    faster = Rates(*(0.5 * rate for rate in rates))
    assert step_s(scheduler, work, faster, sizes) == pytest.approx(slowest.step_s / 2)
