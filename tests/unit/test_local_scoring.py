"""Scores of a local teacher: gathered from several ranks; nothing is scored twice."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from gkd.actor.frozen.pools import LocalScoring
from gkd.config.load import load_config
from gkd.scoring.group_endpoint import GroupEndpoint, ScoreSummary
from gkd.types import TeacherScores
from teacher_server.wire.table import TopKTable
from tests.rollout_chunks import chunk_of
from tests.unit.local_ray import Ref


def score(mass: float, n_rows: int = 2) -> TeacherScores:
    ids = np.arange(n_rows, dtype=np.int32)[:, None]
    logprobs = np.full((n_rows, 1), np.log(mass), np.float32)
    return TeacherScores(TopKTable(ids, logprobs, np.full(n_rows, 1 - mass, np.float32)))


def test_parts_are_gathered_in_the_chunks_order() -> None:
    """Fails if the scores of one sequence are trained on as those of another, or the summary omits a part."""
    endpoint = GroupEndpoint(load_config(None, []))
    first, second = np.array([3, 0], "<i4").tobytes(), np.array([2, 1], "<i4").tobytes()
    parts = [score(0.3), score(0.0625)], [score(0.2), score(0.1)]
    scores, encoded = endpoint.gather_scores([first, second], *parts)
    masses = [float(np.exp(s.topk.logprobs[0, 0])) for s in scores if s.topk is not None]
    np.testing.assert_allclose(masses, [0.0625, 0.1, 0.2, 0.3], rtol=1e-6)
    summary = ScoreSummary.decode(encoded)
    assert summary.masses.sum() == pytest.approx(sum(masses))
    assert summary.n_bytes.sum() == 4 * 2 * 12 and summary.times is None


@pytest.mark.usefixtures("local_ray")
def test_chunks_with_scores_are_not_scored_again() -> None:
    """Fails if a batch that was scored before a resume, or in the run that is replayed, is scored again."""
    chunk = chunk_of(range(2), [1, 2])
    scoring = LocalScoring(list, [], timeout_s=1.0)
    pending = scoring.submit(chunk)
    assert (pending.ref, pending.summary) == (None, None)
    summary = ScoreSummary(np.full(2, 0.5, np.float32), np.array([8, 16]))
    (scored,) = scoring.collect([replace(pending, ref="scores", summary=Ref(summary.encode()))])
    assert (scored.rollouts, scored.ref, scored.n_teacher_bytes) == (chunk, "scores", 24)
    assert scoring.collect([]) == []
