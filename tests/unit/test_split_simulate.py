"""The simulation of a run: against closed forms, a pass-by-pass count, and what the schedulers promise."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gkd.data.chunks import CHUNK_SIZE
from gkd.rollout.coalesce import Coalescer
from gkd.rollout.sampling import Job, Sampling
from gkd.tools.split_tuner import dispatch, stream
from gkd.tools.split_tuner.batches import chunk_times
from gkd.tools.split_tuner.engine import Engine, finish_times
from gkd.tools.split_tuner.rates import Lengths, Rates, Sizes, Workload, lognormal
from gkd.tools.split_tuner.simulate import simulate
from gkd.tools.split_tuner.teacher import Teacher
from gkd.types import Rollout

FREE = Rates(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
SCHEDULERS = ("sync", "one_step_off", "two_step_off", "stream")
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


def work(lengths: Lengths, n_prompts: int, **more: object) -> Workload:
    usual = Workload(n_prompts, n_prompts, 1, 64, 16, 10.0, 0.0, True, True, True, lengths)
    return replace(usual, **more)  # type: ignore[arg-type]


def equal(tokens: float) -> Lengths:
    return Lengths(np.array([0.0, 100.0]), np.array([[tokens, tokens]]), tokens)


def test_equal_lengths_on_one_engine_are_a_product() -> None:
    """Fails if the simulation counts a pass too many, or forgets the prompts."""
    took = finish_times(np.full(8, 50), 10.0, 64, RATES)
    np.testing.assert_allclose(took, 50 * (0.01 + 8 * 0.001) + 80 * 1e-4 + 8 * 0.002)


def count_passes(lengths: list[int], prompt: float, max_running: int) -> list[float]:
    """Pass by pass, one token at a time."""
    waiting, running, time_s = list(enumerate(lengths)), {}, 0.0
    finished = [0.0] * len(lengths)
    while waiting or running:
        begun = [waiting.pop(0) for _ in range(min(len(waiting), max_running - len(running)))]
        running |= dict(begun)
        time_s += RATES.pass_s + RATES.sequence_s * len(running) + RATES.prefill_s * prompt * len(begun)
        running = {i: left - 1 for i, left in running.items()}
        done = [i for i, left in running.items() if left == 0]
        time_s += RATES.hand_over_s * len(done)
        for i in done:
            finished[i] = time_s
            del running[i]
    return finished


@given(st.lists(st.integers(1, 30), min_size=1, max_size=25), st.integers(1, 30))
@settings(deadline=None, max_examples=150)
def test_finish_times_are_those_of_counting_every_pass(lengths: list[int], max_running: int) -> None:
    """Fails if a queue in front of an engine, or its tail, takes another time than the passes that it is made of."""
    took = finish_times(np.array(lengths), 7.0, max_running, RATES)
    np.testing.assert_allclose(took, count_passes(lengths, 7.0, max_running))


def test_an_engine_stops_only_between_passes() -> None:
    """Fails if new weights come in the middle of a pass, or caches that they made worthless cost nothing."""
    engine = Engine(RATES, 4)
    engine.add(0, [10, 10], 20.0)
    engine.begin()
    pass_s = 0.01 + 2 * 0.001
    engine.run_to(40 * 1e-4 + 2.5 * pass_s)
    assert engine.n_passes == 3 and engine.at_s == pytest.approx(40 * 1e-4 + 3 * pass_s)
    engine.hold(1.0)
    assert engine.next_finish_s() == pytest.approx(1.0 + 7 * pass_s + 2 * (20 + 3) * 1e-4)
    assert engine.run_to_finish() == [0, 0] and engine.busy_s == pytest.approx(10 * pass_s + (40 + 46) * 1e-4)


@given(
    st.lists(st.tuples(st.floats(0, 10), st.integers(0, 2)), min_size=1, max_size=60),
    st.integers(1, 5),
    st.sampled_from([0.5, 3.0, 11.0]),
)
@settings(deadline=None, max_examples=100)
def test_chunks_leave_as_from_an_engine(made: list[tuple[float, int]], size: int, linger: float) -> None:
    """Fails if the teacher hears of a sequence at another time than from the engine's own coalescer."""
    finished, groups = np.array([t for t, _ in made]), np.array([g for _, g in made])
    chunks, job = Coalescer(3, size), Job(1, Sampling(1, 1.0, 1.0, 8, seed=0), linger)
    expected, nothing = np.empty(len(made)), np.zeros(0, np.int32)
    end = finished.max()
    for now in sorted({*finished.tolist(), *(finished + linger).tolist()}):
        for i in np.flatnonzero(finished == now).tolist():
            chunks.add(job, Rollout(i, 3 * i + groups[i], nothing, nothing, nothing, (), "stop"), now)
        for _, _, rollouts in chunks.due(now, flush=now == end):
            expected[[rollout.prompt_id for rollout in rollouts]] = now
    np.testing.assert_array_equal(chunk_times(finished, groups, size, linger), expected)


def test_sync_is_the_sum_and_the_others_are_the_longest() -> None:
    """Fails if a scheduler overlaps other stages than the loop does."""
    workload, sizes = work(equal(100.0), 8), Sizes(dp=1, engines=1, workers=4)
    engine_s = 100 * (0.01 + 8 * 0.001) + 80 * 1e-4 + 8 * 0.002
    answers_s = engine_s + 0.02
    scores_s = 2 * (0.01 + 110 * 1e-4)  # all eight come at once, to four workers
    train_s = 0.1 + 880 * 2e-4
    step_s = {name: simulate(name, sizes, workload, RATES).step_s for name in SCHEDULERS}
    assert step_s["sync"] == pytest.approx(answers_s + scores_s + train_s + 0.06)
    assert step_s["one_step_off"] == pytest.approx(max(answers_s, train_s) + 0.06)
    assert step_s["two_step_off"] == pytest.approx(max(answers_s, train_s) + 0.06)
    slow = replace(RATES, train_token_s=1e-2)
    train_s = 0.1 + 880 * 1e-2
    assert simulate("one_step_off", sizes, workload, slow).step_s == pytest.approx(train_s + 0.06)
    assert simulate("two_step_off", sizes, workload, slow).step_s == pytest.approx(train_s + 0.06)
    assert simulate("stream", sizes, workload, slow, max_staleness=2).step_s == pytest.approx(train_s + 0.06, rel=0.02)
    # With one step off the next step waits for late scores. With two steps off they arrive during training.
    late = replace(RATES, score_s=1.0, train_s=0.5)
    train_s, scores_s = 0.5 + 880 * 2e-4, 2 * (1.0 + 110 * 1e-4)
    expected = (answers_s + scores_s - train_s - 0.06) / 2 + train_s + 0.06  # asked when its answers are there
    assert simulate("one_step_off", sizes, workload, late).step_s == pytest.approx(expected)
    assert simulate("two_step_off", sizes, workload, late).step_s == pytest.approx(scores_s, rel=0.01)
    # one engine that always has eight sequences, and stands still while it takes new weights
    busy = replace(workload, max_num_seqs=8)
    rates = replace(RATES, prefill_s=0.0)
    expected = 100 * (0.01 + 8 * 0.001) + 8 * RATES.hand_over_s + RATES.sync_s
    assert simulate("stream", sizes, busy, rates).step_s == pytest.approx(expected, rel=0.03)


def test_without_overlap_the_teacher_waits_for_the_last_answer() -> None:
    """Fails if the overlap makes no difference."""
    workload, sizes = work(lognormal(60, 0.8, 300), 64), Sizes(dp=1, engines=2, workers=1)
    rates = replace(RATES, score_token_s=1e-3)
    late = simulate("sync", sizes, replace(workload, overlap=False), rates)
    assert late.step_s > 1.1 * simulate("sync", sizes, workload, rates).step_s
    assert late.waited["teacher"] * late.step_s >= 64 * 0.01


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_every_token_is_made_once(scheduler: str) -> None:
    """Fails if a simulated run trains on more or fewer tokens than its engines write."""
    workload = work(equal(30.0), 12, n=2, n_on_policy=9.0, dataset_tokens=50.0)
    outcome = simulate(scheduler, Sizes(2, 3, 2), workload, RATES, n_steps=20)
    assert outcome.response_tokens_per_s * outcome.step_s == pytest.approx(9 * 2 * 30 + 3 * 50)


@given(
    st.integers(0, 4),
    st.integers(1, 6),
    st.integers(1, 5),
    st.integers(1, 12),
    st.sampled_from([1, 2, 3]),
    st.floats(0.0, 0.02),
    st.integers(0, 5),
)
@settings(deadline=None, max_examples=60)
def test_no_sequence_is_older_than_the_bound(
    bound: int, engines: int, max_num_seqs: int, n_prompts: int, n: int, token_s: float, seed: int
) -> None:
    """Fails if the simulation lets a stream run further ahead than the loop, and so predicts too fast a step."""
    workload = work(lognormal(20, 1.0, 200), n_prompts, n=n, max_num_seqs=max_num_seqs)
    rates = replace(RATES, train_token_s=token_s)
    outcome = simulate("stream", Sizes(1, engines, 1), workload, rates, max_staleness=bound, seed=seed, n_steps=8)
    assert set(outcome.staleness) <= set(range(bound + 1)) and sum(outcome.staleness.values()) == pytest.approx(1)
    assert outcome.step_s > 0 and all(0 <= share <= 1 + 1e-9 for share in outcome.busy.values())


@pytest.mark.parametrize(("scheduler", "age"), [("sync", 0), ("one_step_off", 1), ("two_step_off", 2)])
def test_batches_have_one_age(scheduler: str, age: int) -> None:
    """Fails if a batch is begun before or after its turn."""
    outcome = simulate(scheduler, Sizes(1, 2, 1), work(equal(10.0), 4), RATES, n_steps=10)
    assert outcome.staleness == {age: 1.0}


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_the_seed_decides_all(scheduler: str) -> None:
    """Fails if the same question has two answers."""
    workload = work(lognormal(40, 1.0, 400), 16)
    once, again, other = (simulate(scheduler, Sizes(2, 2, 2), workload, RATES, seed=s, n_steps=9) for s in (3, 3, 4))
    assert once == again and once != other


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_faster_stages_make_no_slower_step(scheduler: str) -> None:
    """Fails if the simulation would recommend fewer workers, or slower ones."""
    workload = work(lognormal(40, 1.0, 400), 32)
    slow = replace(RATES, score_token_s=2e-3)
    steps = [simulate(scheduler, Sizes(2, 3, n), workload, slow, n_steps=20).step_s for n in (1, 2, 4, 8)]
    # Which prompts share a step of a stream changes with the times.
    assert all(after <= 1.001 * before for before, after in pairwise(steps)) and steps[-1] < 0.99 * steps[0]
    if scheduler != "stream":
        for faster in ({"pass_s": 0.005}, {"train_token_s": 1e-4}, {"sync_s": 0.0}):
            outcome = simulate(scheduler, Sizes(2, 3, 1), workload, replace(slow, **faster), n_steps=20)
            assert outcome.step_s <= 1.01 * steps[0]


@pytest.mark.parametrize(("mean", "sigma", "longest"), [(800.0, 1.0, 32768.0), (800.0, 1.0, 2048.0), (80.0, 0.0, 99.0)])
def test_lognormal_lengths_have_a_lognormal_s_tail(mean: float, sigma: float, longest: float) -> None:
    """Fails if --lengths plans for another longest response, which all wait for, than such lengths have."""
    lengths, rng = lognormal(mean, sigma, longest), np.random.default_rng(1)
    drawn = np.array([lengths.draw(rng, 256, step) for step in range(400)])
    true = np.clip(rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, (400, 256)), 1, longest)
    assert drawn.mean() == pytest.approx(true.mean(), rel=0.02) == lengths.mean
    assert drawn.max(1).mean() == pytest.approx(true.max(1).mean(), rel=0.08)
    assert np.median(drawn) == pytest.approx(np.median(true), rel=0.02) and drawn.max() <= longest
    np.testing.assert_allclose(
        np.interp([50, 99.9], lengths.percent, lengths.tokens[0]), np.percentile(true, [50, 99.9]), rtol=0.1
    )


def test_the_teacher_is_a_queue() -> None:
    """Fails if workers score two sequences at a time, or idle while some wait."""
    teacher = Teacher(replace(FREE, score_s=1.0, score_token_s=0.1), 2)
    assert teacher.score(0.0, [10, 20, 10]) == pytest.approx(4.0)  # 2 and 3, then 2 + 2
    assert teacher.score(1.0, [0]) == pytest.approx(4.0) and teacher.busy_s == pytest.approx(8.0)


def test_a_batch_is_shared_by_the_engines() -> None:
    """Fails if more engines do not make a batch faster, or one without prompts does."""
    workload = work(equal(50.0), 8)
    times = [simulate("sync", Sizes(8, engines, 8), workload, RATES).step_s for engines in (1, 2, 4, 8)]
    assert times == sorted(times, reverse=True) and len(set(times)) == 4
    # The ninth engine has nothing to do.
    assert simulate("sync", Sizes(8, 9, 8), workload, RATES).step_s == times[-1]


def test_the_engine_that_is_free_first_gets_the_next_prompt() -> None:
    """Fails if the simulation shares prompts out otherwise than `gkd.rollout.dispatcher`."""
    workload = work(equal(1.0), 200, max_num_seqs=4)
    assert dispatch.room(workload, 2) == 4 + CHUNK_SIZE and dispatch.room(workload, 1) == np.inf
    queue, n_held = deque(range(5)), [3, 0, 8]
    assert dispatch.assign(queue, n_held, 8, 2, range(3)) == [(0, 1), (1, 1), (2, 0), (3, 1), (4, 0)]
    assert n_held == [7, 6, 8] and not queue
    # The first engine has the long responses.
    lengths = np.where(np.arange(200) % 2, 1, np.where(np.arange(200) < 8, 1000, 1))
    engine_of, finished = dispatch.answer_batch(lengths, workload, RATES, 2)
    assert engine_of[:8].tolist() == [0, 1] * 4 and np.bincount(engine_of).tolist() == [
        4 + CHUNK_SIZE,
        196 - CHUNK_SIZE,
    ]
    dealt = finish_times(lengths[::2], 10.0, 4, RATES).max()
    assert finished.max() < dealt


@given(st.lists(st.integers(1, 30), min_size=1, max_size=60), st.integers(1, 9), st.integers(1, 4))
@settings(deadline=None, max_examples=100)
def test_engines_of_a_batch_make_the_passes_of_their_own_sequences(
    lengths: list[int], max_running: int, engines: int
) -> None:
    """Fails if a sequence is lost, or finishes at another time than its engine alone would need."""
    workload = work(equal(1.0), len(lengths), max_num_seqs=max_running)
    engine_of, finished = dispatch.answer_batch(np.array(lengths), workload, RATES, engines)
    for number in range(engines):
        mine = np.flatnonzero(engine_of == number)
        expected = count_passes([lengths[i] for i in mine], 10.0, max_running)
        np.testing.assert_allclose(finished[mine], expected)


def test_thousands_of_gpus_are_as_many_events_as_sequences() -> None:
    """Fails if the simulation of 4,096 GPUs takes an event for each token, or minutes."""
    workload = work(lognormal(400, 1.0, 4000), 4096, n=2)
    run = stream._Run(1, Sizes(256, 3072, 768), workload, RATES, 3, seed=0)
    outcome = run.outcome(1)
    assert run.n_events <= 5 * 4096 * 2 and outcome.step_s > 0
