"""Test the remaining time and the trend of a run."""

from __future__ import annotations

import pytest

from tests.unit.console_runs import Clock, line, run


def durations(step: int, total: int, every: int) -> dict[str, float]:
    """Return the times of a step: 1 s, 30 s of warm-up, 10 s of evaluation, 5 s of every 25th checkpoint."""
    parts = {"time/eval_s": 10.0 * (step % every == 0 or step == total), "time/checkpoint_s": 5.0 * (step % 25 == 0)}
    return parts | {"loss/total": 1.0, "time/step_s": 1.0 + sum(parts.values()) + 30.0 * (step == 1)}


def test_the_remaining_time_counts_evaluations_and_checkpoints() -> None:
    """Fails if the ETA jumps after an evaluation or a checkpoint, counts the warm-up, or forgets what is still due."""
    state = run(107)
    assert state.left_s is None
    state.add(0, {"eval/kl": 1.0, "time/eval_s": 10.0, "time/step_s": 12.0})
    assert state.left_s is None
    times = {step: durations(step, 107, 10) for step in range(1, 108)}
    for step in range(1, 108):
        state.add(step, times[step])
        left_s = sum(times[later]["time/step_s"] for later in range(step + 1, 108))
        if step >= 50:
            assert state.left_s == pytest.approx(left_s, abs=0.05 * left_s + 20.0)  # two evaluations more or less
    assert state.left_s == 0.0


def test_one_slow_step_does_not_multiply_the_remaining_time() -> None:
    """Fails if an outage of the teacher in one step is expected in all later steps."""
    state = run(1000)
    for step in range(1, 12):
        state.add(step, {"loss/total": 1.0, "time/step_s": 300.0 if step == 8 else 2.0})
    assert state.left_s == pytest.approx(2.0 * 989)


def test_the_remaining_time_runs_down_between_steps() -> None:
    """Fails if the panel's ETA stands still during a long step, or becomes negative."""
    clock = Clock()
    state = run(2, clock=clock)
    state.add(1, line(time__step_s=10.0))
    assert state.left_s == 10.0
    clock.now_s += 4.0
    assert state.left_s == 6.0 and state.elapsed_s == 4.0
    clock.now_s += 60.0
    assert state.left_s == 0.0


def test_the_trend_compares_the_halves_of_the_newest_steps() -> None:
    """Fails if an old KL still counts, a trend is named after a few steps, or zero divides."""
    state = run()
    for step in range(1, 8):
        state.add(step, line(loss__token_kl=9.0))
        assert state.trend is None
    for step in range(8, 18):
        state.add(step, line(loss__token_kl=2.0))
    for step in range(18, 28):
        state.add(step, line(loss__token_kl=1.0))
    assert state.trend == pytest.approx(-0.5)
    for step in range(28, 48):
        state.add(step, line(loss__token_kl=0.0))
    assert state.trend is None


def test_a_resumed_run_compares_with_its_first_evaluation() -> None:
    """Fails if "before" of a resumed run is the evaluation after the resume, or its ETA counts steps made before."""
    state = run(10)
    state.add_past(0, {"eval/kl": 0.4, "time/eval_s": 1.0})
    for step in range(1, 5):
        state.add_past(step, line(time__step_s=100.0))
    state.add(5, line(time__step_s=2.0, eval__kl=0.1))
    assert (state.first_step, state.step, state.left_s) == (4, 5, 10.0)
    assert state.scores() == {"eval/kl": (0.4, 0.1)}
    assert state.step_s == 2.0 and state.tokens == 3500.0
