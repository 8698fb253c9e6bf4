"""Test the per-pool metrics, the bottleneck in the step line, and the teacher's work against brute-force counts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gkd.console.state import bottleneck_of
from gkd.metrics.bottleneck import (
    LONGEST,
    SEQUENCES,
    TOKENS,
    WORKERS,
    TeacherMeter,
    bottleneck,
    busy_name,
    rollout_numbers,
    shares,
)
from gkd.metrics.step import step_numbers
from gkd.rollout.vllm.engine import PassMeter
from gkd.types import EngineUsage, RolloutUsage, ScoredChunk, ScoreTimes, SyncReport, TrainStats
from tests.rollout_chunks import chunk_of


def scored(n: int, dp_rank: int) -> ScoredChunk:
    return ScoredChunk(chunk_of(range(n), 3, n_prompt=2, dp_rank=dp_rank), None, None, 8)


def numbers(rollout_s: float, teacher_s: float, train_s: float, step_s: float) -> dict[str, float]:
    times = {"rollout": rollout_s, "teacher": teacher_s, "train": train_s, "weight_sync": 0.1, "step": step_s}
    return {f"time/{name}_s": seconds for name, seconds in times.items()}


@pytest.mark.parametrize(
    ("scheduler", "times", "pool", "share"),
    [
        ("sync", (6.0, 1.0, 3.0, 10.0), "rollout", 0.6),
        ("sync", (3.0, 1.0, 6.0, 10.0), "actor", 0.6),
        ("sync", (2.0, 5.0, 3.0, 10.0), "teacher", 0.5),
        # the engines overlap with training and finish after it
        ("one_step_off", (3.0, 0.5, 6.0, 10.0), "rollout", 0.3),
        ("two_step_off", (0.2, 2.0, 7.0, 10.0), "teacher", 0.2),
        ("stream", (1.0, 0.1, 8.0, 10.0), "rollout", 0.1),
        ("stream", (0.2, 0.1, 9.0, 10.0), "actor", 0.9),
        ("one_step_off", (0.0, 0.0, 9.0, 10.0), "actor", 0.9),
    ],
)
def test_the_step_line_names_the_bottleneck(
    scheduler: str, times: tuple[float, float, float, float], pool: str, share: float
) -> None:
    """Fails if the step line names the wrong pool as the bottleneck."""
    m = numbers(*times)
    m |= shares(m, scheduler)
    assert bottleneck(m, scheduler) == (pool, pytest.approx(share))
    assert {name: m[f"perf/bound_by_{name}"] for name in ("rollout", "teacher", "actor")} == {
        name: float(name == pool) for name in ("rollout", "teacher", "actor")
    }
    assert bottleneck_of(m) == (pool, pytest.approx(share)), "what the step line and the panel show"


@pytest.mark.parametrize("stage", ["eval", "checkpoint", "record"])
def test_an_evaluation_or_a_save_does_not_change_the_bottleneck(stage: str) -> None:
    """Fails if a step with an evaluation, a save or a recording names another bottleneck than its neighbors."""
    usual = numbers(0.6, 0.1, 1.2, 2.0)
    with_more = usual | {f"time/{stage}_s": 20.0, "time/step_s": 22.0}
    assert shares(with_more, "one_step_off") == pytest.approx(shares(usual, "one_step_off"))
    assert shares(usual, "one_step_off")["perf/bound_by_rollout"] == 1.0
    busy = shares(with_more | {"perf/engines": 2.0, "perf/pass_s": 1.0}, "stream")["perf/rollout_busy_share"]
    assert busy == pytest.approx(0.25 if stage == "eval" else 0.5 / 22.0)


def test_reference_time_counts_for_the_actor() -> None:
    """Fails if the time of the reference model is not counted for the actor."""
    m = numbers(3.0, 0.5, 2.5, 10.0) | {"time/reference_s": 2.5}
    assert bottleneck(shares(m, "sync"), "sync") == ("actor", pytest.approx(0.5))


def test_an_engine_counts_the_tokens_of_its_passes() -> None:
    """Fails if a forward pass counts waiting sequences, or a prompt is counted twice."""
    now = [0.0]
    meter = PassMeter(2, clock=lambda: now[0])

    def one_pass() -> None:
        now[0] += 0.5

    for n_prompt in (7, 5, 3):
        meter.added(n_prompt)
    meter.time_pass(one_pass)  # two of three sequences start
    meter.finished(1)
    now[0] += 0.125  # the gap before the next pass
    meter.time_pass(one_pass)  # the third sequence starts
    now[0] += 5.0
    meter.paused(12)
    meter.time_pass(one_pass)  # 12 tokens are prefilled again
    usage = meter.pop_usage()
    assert (usage.busy_s, usage.gap_s, usage.longest_response) == (1.5, 0.125, 1)
    rows = np.array([[1, 2, 12, 0.5], [1, 2, 3, 0.5], [1, 2, 12, 0.5]])
    np.testing.assert_allclose(usage.products, rows.T @ rows)
    meter.added(4)
    meter.dropped(0)
    meter.added(6)
    meter.time_pass(one_pass)
    np.testing.assert_allclose(meter.pop_usage().products[0], [1, 1, 6, 0.5])
    meter.dropped(0)
    now[0] += 5.0
    meter.added(1)
    meter.time_pass(one_pass)
    assert meter.pop_usage().gap_s == 0.0  # no sequence was running
    assert meter.pop_usage().products[0, 0] == 0


def test_rollout_numbers_are_sums_and_the_longest_response() -> None:
    """Fails if the tuner's inputs do not match the forward passes of the engines."""
    row = np.array([1.0, 3.0, 10.0, 0.5])
    engines = [
        EngineUsage(0.5, 0.25, np.outer(row, row), 20),
        EngineUsage(1.0, 0.5, 2 * np.outer(row, row), 30),
    ]
    m = rollout_numbers(RolloutUsage(engines, 1.25))
    assert (m["perf/pass_n"], m["perf/pass_b"], m["perf/pass_bs"], m["perf/pass_pp"]) == (3, 9, 4.5, 300)
    assert (m["perf/engine_busy_max_s"], m["perf/generate_s"], m[LONGEST]) == (1.0, 1.25, 30)
    assert m["perf/gap_s"] == 0.75
    assert shares(m | numbers(1, 0, 0, 2), "sync")["perf/rollout_busy_share"] == pytest.approx(1.5 / 2 / 2)
    idle = rollout_numbers(RolloutUsage([EngineUsage(0.0, 0.0, np.zeros((4, 4)), 0)], 0.0))
    assert idle[LONGEST] == idle["perf/pass_n"] == 0


def test_group_tokens_max_is_the_largest_group() -> None:
    """Fails if perf/group_tokens_max is not the token count of the slowest data-parallel group."""
    batch = [scored(2, 0), scored(1, 1), scored(2, 1)]
    m = step_numbers(batch, TrainStats(1.0, 1), SyncReport(8, 0), version=0)
    assert m["perf/group_tokens_max"] == 15


def timed(times: ScoreTimes | None, *n_tokens: int) -> ScoredChunk:
    return ScoredChunk(chunk_of(range(len(n_tokens)), n_tokens, n_prompt=0), None, None, 8, times)


def busy_s(numbers: dict[str, float], workers: int) -> float:
    return max((numbers.get(busy_name(n), 0.0) for n in WORKERS if n <= workers), default=0.0)


@given(
    st.lists(st.tuples(st.floats(0, 9), st.lists(st.floats(0, 9), min_size=1, max_size=5)), min_size=1, max_size=6),
    st.floats(1, 10),
)
@settings(max_examples=60)
def test_teacher_work_matches_its_open_requests(requests: list[tuple[float, list[float]]], end_s: float) -> None:
    """Fails if queue time counts as work, or requests are counted for the wrong number of workers or the wrong step."""
    now = [0.5]
    meter = TeacherMeter(0, clock=lambda: now[0])
    assert meter.end_step() == {}
    meter.add([timed(ScoreTimes(t, np.array([t + s for s in after])), *[7] * len(after)) for t, after in requests])
    now[0] = end_s
    got = meter.end_step()
    spans = [(t, t + s) for t, after in requests for s in after]
    at = np.unique([0.5, end_s, *(t for span in spans for t in span if 0.5 < t < end_s)])
    n_open = np.array([sum(a <= left and b > left for a, b in spans) for left in at[:-1]])
    for workers in (1, 2, 4, 8):
        expected = float(np.minimum(n_open, workers) @ np.diff(at))
        assert busy_s(got, workers) == pytest.approx(expected, abs=1e-9)
    if got:
        n_done = sum(0.5 < b <= end_s and a < end_s for a, b in spans)
        assert (got[SEQUENCES], got[TOKENS]) == (n_done, 7 * n_done)


def test_restored_scores_do_not_count_as_work() -> None:
    """Fails if restored scores, which have no times, count as work or raise an error."""
    now = [0.0]
    meter = TeacherMeter(0, clock=lambda: now[0])
    meter.end_step()
    meter.add([timed(None, 5, 5)])
    now[0] = 5.0
    assert meter.end_step() == {}
    meter.add([timed(None, 5, 5), timed(ScoreTimes(6.0, np.array([8.0])), 9)])
    now[0] = 10.0
    assert meter.end_step() == {busy_name(1): 2.0, SEQUENCES: 1.0, TOKENS: 9.0}


def test_a_step_is_reported_when_all_its_requests_are_known() -> None:
    """Fails if a step's work is reported before all batches that overlap with it are known."""
    now = [0.0]
    meter = TeacherMeter(1, clock=lambda: now[0])
    meter.end_step()
    meter.add([timed(ScoreTimes(0.0, np.array([2.0])), 3)])
    now[0] = 4.0
    assert meter.end_step() == {}, "the requests of the next batch are not known yet"
    meter.add([timed(ScoreTimes(1.0, np.array([6.0])), 4)])
    now[0] = 8.0
    assert meter.end_step() == {busy_name(1): 4.0, busy_name(2): 5.0, SEQUENCES: 1.0, TOKENS: 3.0}
    now[0] = 9.0
    assert meter.end_step() == {busy_name(1): 2.0, SEQUENCES: 1.0, TOKENS: 4.0}
