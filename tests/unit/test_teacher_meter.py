"""Test the teacher's measured work against a brute-force count and against a queue of requests."""

from __future__ import annotations

import heapq

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gkd.metrics.bottleneck import SEQUENCES, TOKENS, WORKERS, TeacherMeter, busy_name
from gkd.types import ScoredChunk, ScoreTimes
from tests.rollout_chunks import chunk_of


def scored(times: ScoreTimes | None, *n_tokens: int) -> ScoredChunk:
    return ScoredChunk(chunk_of(range(len(n_tokens)), n_tokens, n_prompt=0), None, None, 8, times)


def busy_s(numbers: dict[str, float], workers: int) -> float:
    return max((numbers.get(busy_name(n), 0.0) for n in WORKERS if n <= workers), default=0.0)


@given(
    st.lists(st.tuples(st.floats(0, 9), st.lists(st.floats(0, 9), min_size=1, max_size=5)), min_size=1, max_size=6),
    st.floats(1, 10),
)
@settings(deadline=None, max_examples=60)
def test_teacher_work_matches_its_open_requests(requests: list[tuple[float, list[float]]], end_s: float) -> None:
    """Fails if queue time counts as work, or requests are counted for the wrong number of workers or the wrong step."""
    now = [0.5]
    meter = TeacherMeter(0, clock=lambda: now[0])
    assert meter.end_step() == {}
    meter.add([scored(ScoreTimes(t, np.array([t + s for s in after])), *[7] * len(after)) for t, after in requests])
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
    meter.add([scored(None, 5, 5)])
    now[0] = 5.0
    assert meter.end_step() == {}
    meter.add([scored(None, 5, 5), scored(ScoreTimes(6.0, np.array([8.0])), 9)])
    now[0] = 10.0
    assert meter.end_step() == {busy_name(1): 2.0, SEQUENCES: 1.0, TOKENS: 9.0}


def test_a_step_is_reported_when_all_its_requests_are_known() -> None:
    """Fails if a step's work is reported before all batches that overlap with it are known."""
    now = [0.0]
    meter = TeacherMeter(1, clock=lambda: now[0])
    meter.end_step()
    meter.add([scored(ScoreTimes(0.0, np.array([2.0])), 3)])
    now[0] = 4.0
    assert meter.end_step() == {}, "the requests of the next batch are not known yet"
    meter.add([scored(ScoreTimes(1.0, np.array([6.0])), 4)])
    now[0] = 8.0
    assert meter.end_step() == {busy_name(1): 4.0, busy_name(2): 5.0, SEQUENCES: 1.0, TOKENS: 3.0}
    now[0] = 9.0
    assert meter.end_step() == {busy_name(1): 2.0, SEQUENCES: 1.0, TOKENS: 4.0}


@pytest.mark.parametrize("bound", [0, 1, 3])
@pytest.mark.parametrize("workers", [1, 2, 4])
def test_the_measured_work_is_what_the_workers_did(bound: int, workers: int) -> None:
    """Fails if queue time counts as work, or the work for a later batch is not counted."""
    rng, n_steps = np.random.default_rng(0), 40
    free, ends, work = [0.0] * workers, [0.0], list[tuple[float, float]]()
    batches: list[list[ScoredChunk]] = [[] for _ in range(n_steps + bound)]
    for step in range(n_steps):
        for submitted in np.sort(rng.uniform(ends[-1], ends[-1] + 1.0, 12)).tolist():  # first come, first served
            began = max(submitted, heapq.heappop(free))
            work.append((began, began + float(rng.exponential(0.08 * workers))))
            heapq.heappush(free, work[-1][1])
            batch = batches[step + int(rng.integers(0, bound + 1))]  # it may belong to one of the next steps
            batch.append(scored(ScoreTimes(submitted, np.array([work[-1][1]])), 5))
        last = [float(chunk.times.completed_s.max()) for chunk in batches[step] if chunk.times is not None]
        ends.append(max(ends[-1] + 1.0, *last, 0.0))  # a step ends when its batch is scored
    at = iter(ends)
    meter = TeacherMeter(bound, clock=lambda: next(at))
    meter.end_step()
    measured = 0.0
    for batch in batches[:n_steps]:
        meter.add(batch)
        measured += busy_s(meter.end_step(), workers)
    true = sum(max(0.0, min(ended, ends[n_steps - bound]) - began) for began, ended in work)
    assert measured == pytest.approx(true) and true > 20.0
