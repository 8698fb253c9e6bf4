"""Ray's size limit below which results are sent inline to the driver instead of an object store."""

from __future__ import annotations

import numpy as np
import pytest
from ray._private.serialization import SerializationContext
from ray._private.worker import global_worker

from gkd.data.chunks import chunk_sizes, encode_sizes
from gkd.handles import ScoreTimes
from gkd.launcher import INLINE_BYTES, worker_env
from gkd.rollout.pool import CHUNK_SIZE
from gkd.teacher.records import ScoreSummary
from gkd.types import Rollout, TeacherScores, TeacherTopK

ONE = np.zeros(1, np.float32)
ROLLOUT = Rollout(0, 0, np.zeros(1, np.int32), np.zeros(1, np.int32), ONE, (), "stop", on_policy=False)


def n_bytes(value: object) -> int:
    """Return the size of a result as Ray computes it."""
    return int(SerializationContext(global_worker).serialize(value).total_bytes)


@pytest.mark.parametrize(
    "bulk",
    [
        ROLLOUT,
        TeacherScores(sampled_logprobs=ONE),
        TeacherScores(hidden=ONE[None]),
        TeacherScores(logits=ONE[None]),
        TeacherScores(TeacherTopK(np.zeros((1, 1), np.int32), ONE[None], ONE)),
    ],
)
def test_the_smallest_list_of_rollouts_or_scores_is_over_the_limit(bulk: object) -> None:
    """Fails if Ray would send small chunks of rollouts or scores inline through the driver."""
    assert n_bytes([bulk]) >= INLINE_BYTES


def test_sizes_and_summaries_are_under_the_limit() -> None:
    """Fails if sizes or summaries of a chunk go through an object store."""
    sizes = encode_sizes(chunk_sizes(0, [ROLLOUT] * CHUNK_SIZE, 0))
    summary = ScoreSummary(1.0, 2, ScoreTimes(0.0, (1.0,) * CHUNK_SIZE))
    assert n_bytes(sizes) < INLINE_BYTES and n_bytes(summary.encode()) < INLINE_BYTES


@pytest.mark.parametrize("on_cpu", [False, True])
def test_the_limit_is_in_the_workers_environment(on_cpu: bool) -> None:
    """Fails if workers start without the limit. tests/e2e/test_driver_bytes.py checks that Ray applies it."""
    assert worker_env(on_cpu)["RAY_max_direct_call_object_size"] == str(INLINE_BYTES)


@pytest.mark.parametrize("summary", [ScoreSummary(0.25, 2**40), ScoreSummary(None, 0)])
def test_a_score_summary_is_decoded_exactly(summary: ScoreSummary) -> None:
    """Fails if mass, bytes or times of the summary change in the encoding."""
    assert ScoreSummary.decode(summary.encode()) == summary and len(summary.encode()) == 16
    times = ScoreTimes(1.7e9 + 2**-10, (1.7e9 + 0.5, 1.7e9 + 0.25))
    timed = ScoreSummary(summary.mass, summary.n_bytes, times)
    assert ScoreSummary.decode(timed.encode()).times == times and len(timed.encode()) == 16 + 8 * 3
