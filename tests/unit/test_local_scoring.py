"""A local teacher's work dealt out to the actor's ranks, and put together again."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gkd.config.load import load_config
from gkd.handles import PendingScores, RolloutChunk
from gkd.teacher.local import LocalScoring, deal
from gkd.teacher.records import RecordingEndpoint, ScoreSummary
from gkd.types import TeacherScores, TeacherTopK


def chunk(lengths: list[int]) -> RolloutChunk:
    n = np.array(lengths, np.int32)
    # The samples of two chunks may have the same numbers, as those of two evaluations.
    return RolloutChunk(0, None, len(n), 0, 0, 0, 0, sample_index=np.arange(len(n), dtype=np.int32), n_tokens=n)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.lists(st.integers(1, 300), min_size=1, max_size=16), min_size=1, max_size=8),
    st.integers(1, 9),
)
def test_every_sequence_is_dealt_once_and_evenly(lengths: list[list[int]], n_ranks: int) -> None:
    """Fails if a sequence is scored twice or by nobody, or one rank gets what others could have taken."""
    shares = deal([chunk(each) for each in lengths], n_ranks)
    assert len(shares) == n_ranks
    dealt, tokens = [], [0] * n_ranks
    for rank, share in enumerate(shares):
        for i, take in share:
            places = np.frombuffer(take, "<i4").tolist()
            assert places
            dealt += [(i, place) for place in places]
            tokens[rank] += sum(lengths[i][place] for place in places)
    assert sorted(dealt) == [(i, place) for i, each in enumerate(lengths) for place in range(len(each))]
    flat = [n for each in lengths for n in each]
    assert max(tokens) <= 1.01 * sum(flat) / n_ranks + max(flat)


def test_whole_chunks_stay_whole() -> None:
    """Fails if a deal that is even without it still cuts chunks, and each rank has to fetch all of them."""
    shares = deal([chunk([10] * 16) for _ in range(4)], 4)
    assert [[i for i, _ in share] for share in shares] == [[0], [1], [2], [3]]


def score(value: float, n_rows: int = 2) -> TeacherScores:
    ids = np.arange(n_rows, dtype=np.int32)[:, None]
    logprobs = np.full((n_rows, 1), np.log(value), np.float32)
    return TeacherScores(TeacherTopK(ids, logprobs, np.full(n_rows, 1 - value, np.float32)))


def test_parts_are_put_in_the_chunks_order() -> None:
    """Fails if the scores of one sequence are trained on as those of another, or the summary forgets a part."""
    endpoint = RecordingEndpoint(load_config(None, []))
    first, second = np.array([3, 0], "<i4").tobytes(), np.array([2, 1], "<i4").tobytes()
    parts = [score(0.3), score(0.0625)], [score(0.2), score(0.1)]
    scores, summary = endpoint.assemble([first, second], *parts)
    masses = [float(np.exp(s.topk.topk_logprobs[0, 0])) for s in scores if s.topk is not None]
    np.testing.assert_allclose(masses, [0.0625, 0.1, 0.2, 0.3], rtol=1e-6)
    told = ScoreSummary.decode(summary)
    assert told.mass == pytest.approx(2 * sum(masses)) and told.n_bytes == 4 * 2 * 12 and told.times is None


def test_nothing_is_asked_where_nothing_is_pending() -> None:
    """Fails if a batch that was scored before a resume, or in the run that is replayed, is scored again."""
    scoring = LocalScoring([], [], timeout_s=1.0)
    pending = scoring.submit(chunk([1, 2]))
    assert (pending.ref, pending.summary) == (None, None)
    restored = replace(pending, ref="scores", summary="summary")
    assert scoring._all_scored([restored]) == [PendingScores(restored.rollouts, "scores", "summary")]
    assert scoring.collect([]) == []
