"""Selection of the requests that share a forward pass."""

from __future__ import annotations

import numpy as np
import pytest

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


@pytest.mark.parametrize("pads", [True, False])
def test_padding_counts_and_no_request_is_lost(pads: bool) -> None:
    """Fails if the padded tokens of a batch exceed the budget, or padding that the engine does not compute leaves its
    batches empty, or a request is in no batch.
    """
    rng = np.random.default_rng(0)
    waiting = [item(int(n)) for n in rng.integers(2, 300, 200)]
    everything, batches = list(waiting), []
    while waiting:
        oldest = waiting[0]
        batches.append(take_batch(waiting, 1000, pads=pads))
        assert batches[-1][0] is oldest, "the oldest request must be in the batch"
    lengths = [[one.n_tokens for one in batch] for batch in batches]
    sizes = [len(batch) * max(batch) if pads else sum(batch) for batch in lengths]
    assert max(sizes) <= 1000 and (pads or np.mean(sizes[:-1]) > 900)
    assert sorted(id(one) for batch in batches for one in batch) == sorted(map(id, everything))


def sibling(prompt: int, n_prompt: int, n_response: int) -> WorkItem:
    tokens = np.concatenate([np.full(n_prompt, prompt), np.zeros(n_response)]).astype(np.int32)
    header = request(len(tokens), prompt_length=n_prompt)
    return WorkItem(OpenRequest(JOB, header, b"", 0.0), 0, TokenSequence(tokens, n_prompt))


def test_a_common_prompt_counts_once_and_its_sequences_stay_together() -> None:
    """Fails if a batch is full of tokens that the engine does not compute, exceeds the budget, or tears siblings apart
    while other prompts are added.
    """
    waiting = [sibling(1, 100, 40), sibling(2, 90, 50), sibling(3, 70, 70)]
    waiting += [sibling(prompt, n, 20) for _ in range(4) for prompt, n in ((3, 70), (2, 90), (1, 100))]
    everything = list(waiting)
    batch = take_batch(waiting, 500, 16)
    # 140 + 4 x 36 of the first prompt; with the second one 2 x 140 and 6 of its four others, until 500 is exceeded.
    assert [int(one.sequence.token_ids[0]) for one in batch] == [1] * 5 + [2] * 3
    assert 2 * 140 + 6 * 36 <= 500 < 2 * 140 + 7 * 36
    assert [int(one.sequence.token_ids[0]) for one in take_batch(list(everything), 500)].count(1) < 4
    seen = list(batch)
    while waiting:
        seen += take_batch(waiting, 500, 16)
    assert sorted(map(id, seen)) == sorted(map(id, everything))


def test_sequences_without_siblings_are_batched_as_before() -> None:
    """Fails if an engine that shares prompts batches different prompts in another order."""
    rng = np.random.default_rng(0)
    sizes = [(int(p), int(r)) for p, r in zip(rng.integers(1, 200, 60), rng.integers(1, 200, 60), strict=True)]
    waiting = [sibling(i, *size) for i, size in enumerate(sizes)]
    plain, sharing = list(waiting), list(waiting)
    while plain:
        assert take_batch(plain, 1000) == take_batch(sharing, 1000, 16)


def test_a_sequence_over_budget_goes_alone() -> None:
    """Fails if a sequence over the budget never runs, or shares its batch."""
    waiting = [item(2000), item(5)]
    assert [one.n_tokens for one in take_batch(waiting, 1000)] == [2000]


def test_parameters_are_not_mixed() -> None:
    """Fails if a request is scored with the temperature of another one."""
    waiting = [item(10, 1.0), item(10, 0.5), item(10, 1.0)]
    assert [one.request.params.temperature for one in take_batch(waiting, 1000)] == [1.0, 1.0]
    assert [one.request.params.temperature for one in waiting] == [0.5]
