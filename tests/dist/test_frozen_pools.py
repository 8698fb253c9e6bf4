"""Driver side of the frozen models over real Ray actors: distribution, non-blocking calls, errors.

Student, teacher and reference are in host memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import ray

from gkd.actor.frozen.pools import LocalScoring, ReferencePool
from gkd.data.chunks import chunk_sizes
from gkd.data.scatter import scatter_to_ranks
from gkd.errors import TeacherError
from gkd.memory.states import KINDS
from gkd.scoring.group_endpoint import GroupEndpoint
from gkd.scoring.pool import RECORDS
from gkd.types import PendingScores, Rollout, ScoredChunk
from tests.bench.student_case import save_model
from tests.dist.slots import actor_slots
from tests.dist.test_offload import N_RANKS, Actor, batch

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def actor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Actor]:
    folder = tmp_path_factory.mktemp("model")
    save_model(folder, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, head_dim=16)
    with actor_slots(N_RANKS) as slots:
        local = ("teacher.backend=local", f"teacher.path={folder}", "teacher.topk=4")
        on_host = ("actor.strategy=fsdp2", "actor.fsdp_cpu_offload=true", "actor.offload_train=true")
        made = Actor(slots, folder, *on_host, "distill.reference_kl_weight=0.1", *local)
        made.pool.init_reference(120)
        made.pool.init_teacher(120)
        yield made


@pytest.fixture(scope="module")
def endpoints(actor: Actor) -> list[Any]:
    endpoint = ray.remote(concurrency_groups={RECORDS: 1})(GroupEndpoint)
    return [endpoint.options(num_cpus=0).remote(actor.config) for _ in range(N_RANKS)]


@pytest.fixture(scope="module")
def reference(actor: Actor, endpoints: list[Any]) -> ReferencePool:
    return ReferencePool(actor.workers, endpoints, actor.config)


def logprobs(chunks: list[ScoredChunk]) -> list[list[np.ndarray]]:
    return [[np.array(table) for table in chunk] for chunk in ray.get([chunk.reference for chunk in chunks])]


def same(one: list[list[np.ndarray]], two: list[list[np.ndarray]]) -> bool:
    return all(np.array_equal(a, b) for x, y in zip(one, two, strict=True) for a, b in zip(x, y, strict=True))


def changed(chunk: ScoredChunk, rollouts: list[Rollout], **fields: Any) -> ScoredChunk:
    return replace(chunk, rollouts=replace(chunk.rollouts, ref=ray.put(rollouts), **fields))


def test_an_actor_before_its_first_step_is_its_reference(actor: Actor, reference: ReferencePool) -> None:
    """Fails if the actor's logprobs reach other sequences, are of other tokens, or need scores."""
    pending = [PendingScores(chunk.rollouts, None, None) for chunk in batch()]
    found = actor.pool.compute_logprobs(pending, blocking=False)
    wanted = logprobs(reference.compute_logprobs(batch()).wait(batch()))
    for own, other in zip(found.wait(), wanted, strict=True):
        for one, two in zip(own, other, strict=True):
            np.testing.assert_allclose(one, two, atol=1e-5)
            assert one.dtype == np.float32


def test_states_on_the_host_stay_there(actor: Actor, reference: ReferencePool) -> None:
    """Fails if actor.fsdp_cpu_offload does not reach the students, or actor.offload_train moves their states anyway."""
    scored = batch()
    chunks = reference.compute_logprobs(scored).wait(scored)
    for _ in range(2):
        assert actor.pool.train_step(chunks).grad_norm > 0
        assert actor.device_bytes() == dict.fromkeys(KINDS, 0)
    assert not [name for name in actor.pool.memory_numbers() if name.startswith("time/train/")]


def test_non_blocking_calls_and_errors(reference: ReferencePool) -> None:
    """Fails if a handle cannot be waited for twice, a bad sequence of one rank hangs the others, or it affects the next
    call.
    """
    good = batch()
    expected = logprobs(reference.compute_logprobs(good).wait(good))
    pending = reference.compute_logprobs(good, blocking=False)
    assert same(logprobs(pending.wait(good, 60)), expected) and same(logprobs(pending.wait(good, 60)), expected)
    assert pending.seconds > 0
    assert all((table < 0).all() for chunk in expected for table in chunk)
    first, second = good
    rollouts = ray.get(second.rollouts.ref)
    bad = [*rollouts[:-1], replace(rollouts[-1], response_ids=rollouts[-1].response_ids[:0])]
    failing_batch = [first, changed(second, bad)]
    failing = reference.compute_logprobs(failing_batch, blocking=False)
    for _ in range(2):
        with pytest.raises(TeacherError):
            failing.wait(failing_batch, 60)
    assert same(logprobs(reference.compute_logprobs(good, blocking=False).wait(good, 60)), expected)


def test_dataset_responses_are_not_computed(reference: ReferencePool) -> None:
    """Fails if a forward pass computes responses that no term needs, or logprobs reach other sequences."""
    first, second = batch()
    expected = logprobs(reference.compute_logprobs([first, second]).wait([first, second]))
    rollouts = ray.get(first.rollouts.ref)
    # A sequence that cannot be scored: computing it would raise an error.
    unscorable = [replace(r, prompt_ids=r.prompt_ids[:0], on_policy=False) for r in rollouts]
    for chunks, indices in (
        ([changed(first, unscorable, on_policy=False), second], (1,)),
        ([changed(first, unscorable, on_policy=False)], ()),
    ):
        found = logprobs(reference.compute_logprobs(chunks).wait(chunks))
        assert same([found[i] for i in indices], [expected[i] for i in indices])
        assert [table.tolist() for table in found[0]] == [[0.0] * len(r.response_ids) for r in rollouts]
        assert {table.dtype for table in found[0]} == {np.dtype(np.float32)}


def test_local_scores_reach_their_sequences(actor: Actor, endpoints: list[Any]) -> None:
    """Fails if scores reach other sequences when a chunk is split over the ranks, or a chunk is scored twice."""
    scoring = LocalScoring(lambda: actor.workers, endpoints, timeout_s=60.0)
    first, second = (chunk.rollouts for chunk in batch())
    rollouts = [ray.get(chunk.ref) for chunk in (first, second)]
    expected = ray.get([chunk.ref for chunk in scoring.collect([scoring.submit(first), scoring.submit(second)])])
    # One chunk of all sequences in another order: both ranks score a part of it.
    indices = [1, 0]
    joined = [rollout for i in indices for rollout in rollouts[i]]
    sizes = replace(
        chunk_sizes(1, [replace(r, on_policy=False) for r in joined], 0), ref=ray.put(joined), on_policy=True
    )
    parts = [rank for rank in scatter_to_ranks([sizes], N_RANKS) if rank]
    assert len(parts) == N_RANKS, "the chunk must be split for this test to be meaningful"
    (scored,) = scoring.collect([scoring.submit(sizes)])
    scores = [score for i in indices for score in expected[i]]
    for found, wanted, rollout in zip(ray.get(scored.ref), scores, joined, strict=True):
        assert found.topk.topk_ids.shape == (len(rollout.response_ids), 4)
        np.testing.assert_allclose(found.topk.topk_logprobs, wanted.topk.topk_logprobs, atol=1e-5)
    one, two = (score.topk.topk_logprobs for score in scores[:2])
    assert np.abs(one - two).max() > 1e-3, "sequences must have different scores for this test to be meaningful"
    assert scored.teacher_mass is not None and 0 < scored.teacher_mass <= sum(len(r.response_ids) for r in joined)
