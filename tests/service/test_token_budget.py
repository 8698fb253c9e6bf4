"""Selection of the requests that share a forward pass."""

from __future__ import annotations

import numpy as np

from teacher_server.engines.base import TokenSequence
from teacher_server.wire.worker_protocol import Assignment
from teacher_server.worker.compute import WorkItem, take_batch
from teacher_server.worker.open_request import OpenRequest
from tests.service.test_request_queue import request

JOB = Assignment(job_id=bytes(16), stream_id=bytes(16), waited_s=0.0, remaining_s=10.0)


def item(n_tokens: int, temperature: float = 1.0) -> WorkItem:
    header = request(n_tokens)
    header.temperature = temperature
    return WorkItem(OpenRequest(JOB, header, b"", 0.0), 0, TokenSequence(np.zeros(n_tokens, np.int32), 1))


def test_padding_counts_and_no_request_is_lost() -> None:
    """Fails if the padded tokens of a batch exceed the budget, or a request is in no batch."""
    rng = np.random.default_rng(0)
    waiting = [item(int(n)) for n in rng.integers(2, 300, 200)]
    everything, seen = list(waiting), []
    while waiting:
        oldest = waiting[0]
        batch = take_batch(waiting, 1000)
        assert batch[0] is oldest, "the oldest request must be in the batch"
        assert len(batch) * max(one.n_tokens for one in batch) <= 1000
        seen += batch
    assert sorted(map(id, seen)) == sorted(map(id, everything))


def test_a_sequence_over_budget_goes_alone() -> None:
    """Fails if a sequence over the budget never runs, or shares its batch."""
    waiting = [item(2000), item(5)]
    assert [one.n_tokens for one in take_batch(waiting, 1000)] == [2000]


def test_parameters_are_not_mixed() -> None:
    """Fails if a request is scored with the temperature of another one."""
    waiting = [item(10, 1.0), item(10, 0.5), item(10, 1.0)]
    assert [one.request.params.temperature for one in take_batch(waiting, 1000)] == [1.0, 1.0]
    assert [one.request.params.temperature for one in waiting] == [0.5]
