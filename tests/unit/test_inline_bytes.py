"""Ray's size limit below which results are sent inline to the driver instead of an object store."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
from ray._private.serialization import SerializationContext
from ray._private.worker import global_worker

from gkd.data.chunks import CHUNK_SIZE, ColumnList, chunk_sizes, encode_sizes, part_of
from gkd.scoring.group_endpoint import ScoreSummary, summary_of
from gkd.start.pools import inline_bytes
from gkd.types import PendingScores, Rollout, ScoreTimes, TeacherScores
from teacher_server.wire.table import TopKTable

TIMES = ScoreTimes(1.7e9 + 2**-10, np.array([1.7e9 + 0.5, 1.7e9 + 0.25, 1.7e9 + 2]))
# A short prompt, and a short response.
IDS, TABLE = np.zeros(24, np.int32), np.zeros((24, 8), np.float32)
ROLLOUT = Rollout(0, 0, IDS, IDS, TABLE[:, 0], (), "stop", on_policy=False)


def n_bytes(value: object) -> int:
    """Return the size of a result as Ray computes it."""
    return int(SerializationContext(global_worker).serialize(value).total_bytes)


@pytest.mark.parametrize(
    "bulk",
    [
        ROLLOUT,
        TeacherScores(sampled_logprobs=TABLE[:, 0]),
        TeacherScores(TopKTable(TABLE.astype(np.int32), TABLE, TABLE[:, 0])),
    ],
)
@pytest.mark.parametrize("n", [CHUNK_SIZE, 256])
def test_a_full_chunk_of_short_rollouts_or_scores_is_over_the_limit(bulk: object, n: int) -> None:
    """Fails if Ray would send full chunks of rollouts or scores inline through the driver."""
    assert n_bytes(ColumnList([deepcopy(bulk) for _ in range(n)])) >= inline_bytes(n)


@pytest.mark.parametrize("n", [CHUNK_SIZE, 256])
def test_sizes_and_summaries_are_under_the_limit(n: int) -> None:
    """Fails if sizes or summaries of a chunk go through an object store."""
    sizes = encode_sizes(chunk_sizes(0, [ROLLOUT] * n, 0))
    summary = summary_of([TeacherScores(sampled_logprobs=TABLE[:, 0])] * n, ScoreTimes(0.0, np.ones(n)))
    assert n_bytes(sizes) < inline_bytes(n) and n_bytes(summary.encode()) < inline_bytes(n)


@pytest.mark.parametrize("mass", [0.25, float("nan")])
def test_a_score_summary_is_decoded_exactly(mass: float) -> None:
    """Fails if masses, bytes or times of the summary change in the encoding, or a part gets those of another one."""
    masses, n_bytes = np.array([mass, 2 * mass, 4 * mass], np.float32), np.array([1, 2**40, 0])
    untimed = ScoreSummary(masses, n_bytes)
    assert ScoreSummary.decode(untimed.encode()).times is None and len(untimed.encode()) == 8 + 16 * 3
    again = ScoreSummary.decode(replace(untimed, times=TIMES).encode())
    assert np.array_equal(again.masses, masses, equal_nan=True) and np.array_equal(again.n_bytes, n_bytes)
    assert again.times.submitted_s == TIMES.submitted_s
    assert again.times.completed_s.tolist() == TIMES.completed_s.tolist()
    rollouts = [replace(ROLLOUT, sample_index=i) for i in range(3)]
    part = part_of(chunk_sizes(0, rollouts, 0), [0, 2])
    scored = again.scored(PendingScores(part, "scores", "summary"))
    assert (scored.ref, scored.n_teacher_bytes, scored.rollouts) == ("scores", 1, part)
    assert scored.teacher_mass == (None if np.isnan(mass) else 5 * mass * len(ROLLOUT.response_ids))
    assert scored.times.submitted_s == TIMES.submitted_s
    assert scored.times.completed_s.tolist() == TIMES.completed_s[[0, 2]].tolist()
