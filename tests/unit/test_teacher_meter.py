"""Test the teacher's measured work against a brute-force count and against simulated requests."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gkd.metrics.pools import WORKERS, busy_name
from gkd.metrics.teacher_meter import SEQUENCES, TOKENS, TeacherMeter
from gkd.tools.split_tuner import batches, stream
from gkd.tools.split_tuner.outcome import Totals
from gkd.tools.split_tuner.rates import Rates, Sizes, Workload, lognormal
from gkd.tools.split_tuner.teacher import Teacher
from gkd.types import ScoredChunk, ScoreTimes
from tests.rollout_chunks import chunk_of

RATES = Rates(0.02, 0.001, 5e-5, 0.01, 0.01, 0.005, 1e-3, 0.1, 2e-4, 0.05, 0.02)
WORK = Workload(32, 32, 1, 64, 16, 12.0, 0.0, True, True, True, lognormal(40, 0.6, 300))


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


class MeteredRun:
    """Feed the requests of a simulated run to the meter, batch by batch, as a real run does."""

    def __init__(self, scheduler: str, bound: int, workers: int, rates: Rates, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rates, self.ends, self.lists = rates, list[float](), list[list[ScoredChunk]]()
        if scheduler == "stream":
            self._stream(bound, workers)
        else:
            self._batches(scheduler, workers, monkeypatch)
        at = iter([0.0, *self.ends])
        meter = TeacherMeter(bound, clock=lambda: next(at))
        meter.end_step()
        self.reported = []
        for batch in self.lists[: len(self.ends)]:
            meter.add(batch)
            self.reported.append(meter.end_step())

    def _stream(self, bound: int, workers: int) -> None:
        watched = self

        class Run(stream._Run):
            def _finish(self, position: int, at_s: float) -> None:
                super()._finish(position, at_s)
                tokens = int(self._lengths[position].sum() + WORK.prompt_tokens)
                requests[position] = scored(ScoreTimes(at_s, np.array([self._scored_s[position]])), tokens)

            def _count(self, totals: Totals, step: int, positions: list[int], n_dataset: int) -> None:
                watched.lists.append([requests[position] for position in positions])
                super()._count(totals, step, positions, n_dataset)

            def _sync(self, trained_s: float) -> float:
                watched.ends.append(trained_s)
                return super()._sync(trained_s)

        requests: dict[int, ScoredChunk] = {}
        Run(bound, Sizes(2, 3, workers), WORK, self.rates, 40, 0).outcome(4)

    def _batches(self, scheduler: str, workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
        chunks, answer, rates = list[ScoredChunk](), batches._answer, self.rates

        class RecordingTeacher(Teacher):
            def score(self, asked_s: float, tokens: tuple[float, ...]) -> float:  # type: ignore[override]
                done_s = super().score(asked_s, tokens)
                chunks.append(scored(ScoreTimes(asked_s, np.array([done_s])), int(sum(tokens))))
                return done_s

        def answered(number: int, step: int, start_s: float, *others: object) -> object:
            if step > len(self.ends):  # no generation overlaps with a push, so the step's batch starts then
                self.ends.append(start_s - rates.sync_s - rates.other_s)
            made = answer(number, step, start_s, *others)  # type: ignore[arg-type]
            self.lists.append(chunks[:])
            chunks.clear()
            return made

        monkeypatch.setattr(batches, "Teacher", RecordingTeacher)
        monkeypatch.setattr(batches, "_answer", answered)
        batches.run(scheduler, Sizes(2, 3, workers), WORK, rates, n_steps=36, warm_up=4, seed=0)


@pytest.mark.parametrize(("scheduler", "bound"), [("sync", 0), ("one_step_off", 1), ("two_step_off", 2)])
@pytest.mark.parametrize(("workers", "slower"), [(1, 0.6), (1, 2.0), (2, 4.0)])
def test_measured_work_matches_the_simulation_of_batches(
    scheduler: str, bound: int, workers: int, slower: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if the time behind another step's requests counts as work."""
    _compare(scheduler, bound, workers, slower, monkeypatch)


@pytest.mark.parametrize("bound", [1, 3])
@pytest.mark.parametrize(("workers", "slower"), [(1, 0.2), (1, 1.0), (2, 2.0)])
def test_measured_work_matches_the_simulation_of_a_stream(
    bound: int, workers: int, slower: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if queue time of a stream's requests counts as work, or a later request is not counted."""
    _compare("stream", bound, workers, slower, monkeypatch)


def _compare(scheduler: str, bound: int, workers: int, slower: float, monkeypatch: pytest.MonkeyPatch) -> None:
    rates = replace(RATES, score_s=slower * RATES.score_s, score_token_s=slower * RATES.score_token_s)
    reported = MeteredRun(scheduler, bound, workers, rates, monkeypatch).reported
    counted = [m for m in reported[bound + 4 :] if m]  # the teacher of a stream may be idle in a step
    assert not any(reported[:bound]) and len(counted) >= 25
    measured = sum(busy_s(m, workers) for m in counted)
    true = sum(m[SEQUENCES] * rates.score_s + m[TOKENS] * rates.score_token_s for m in counted)
    assert measured == pytest.approx(true, rel=0.03)
