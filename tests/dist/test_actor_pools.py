"""Actor pools over real Ray actors with real students: where states are, frozen models, and restarted engines.

A restarted engine is a Ray actor with the product's transfer and a dict as its model; it gets the last weights while
the actor and the other engines are busy.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from gkd.actor.frozen.pools import LocalScoring, ReferencePool
from gkd.actor.worker import CONCURRENCY_GROUPS
from gkd.config.schema import Config
from gkd.data.chunks import chunk_sizes
from gkd.data.scatter import scatter_to_ranks
from gkd.errors import ClusterError, NumericsError, TeacherError, WeightSyncError
from gkd.memory.offload_manager import GIB, state_offload_manager
from gkd.memory.states import KINDS
from gkd.rollout.driver.weight_sync import WeightSync
from gkd.scoring.group_endpoint import GroupEndpoint
from gkd.scoring.pool import RECORDS
from gkd.start.pools import worker_env
from gkd.types import PendingScores, Rollout, ScoredChunk, TrainStats
from tests.bench.student_case import save_model
from tests.device import on_cuda
from tests.dist.actor_ranks import N_RANKS, Actor, Rank, batch
from tests.dist.dict_engine import DictEngine
from tests.dist.slots import actor_slots

pytestmark = pytest.mark.dist

KEEP = {"is_offload_states": False}
ON_CPU = pytest.mark.cpu_only("Ray's slots are logical CPUs")


@pytest.fixture(scope="module")
def ranks() -> Iterator[list[Any]]:
    with actor_slots(N_RANKS) as slots:
        yield slots.spawn(Rank, worker_env(on_cpu=not on_cuda()), concurrency_groups=CONCURRENCY_GROUPS)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_model(folder, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, head_dim=16)
    return folder


def numbers(stats: TrainStats) -> tuple[Any, ...]:
    losses = {name: value for name, value in stats.extra.items() if name.startswith("loss/")}
    return stats.loss, stats.grad_norm, stats.n_loss_tokens, losses


@pytest.mark.parametrize("backend", ["megatron", pytest.param("fsdp2", marks=pytest.mark.slow)])
def test_states_are_where_the_settings_or_the_call_specify(ranks: list[Any], model: Path, backend: str) -> None:
    """Fails if states are elsewhere after a call than it specified, a call computes on offloaded states, a number
    changes, or a call of some ranks alone hangs.
    """
    some = batch()
    plain = Actor(ranks, model, f"actor.strategy={backend}")
    expected = [numbers(plain.pool.train_step(some)), numbers(plain.pool.evaluate(some))]
    expected.append(numbers(plain.pool.train_step(some)))
    plain_bytes = plain.device_bytes()
    assert all(n > 0 for kind, n in plain_bytes.items() if kind != "grads"), "no states move without the setting"
    unmoved = numbers(plain.pool.evaluate(some))
    plain.export({"is_offload_states": True})
    assert numbers(plain.pool.evaluate(some)) == unmoved, "the first move was not of all ranks"
    plain.pool.reload_states()
    _moves_explicitly(plain)
    assert numbers(plain.pool.evaluate(some)) == unmoved
    assert plain.device_bytes()["params"] > 0, "reloaded by the call, and left on the device"
    # A sync that calls some ranks alone leaves their states elsewhere than those of the other ranks.
    plain.pool.offload_states(["params"])
    plain.export()
    assert plain.pool.train_step(some, meta=KEEP).loss > 0
    plain.export()
    assert plain.pool.train_step(some, meta=KEEP).loss > 0
    moved = Actor(ranks, model, f"actor.strategy={backend}", "actor.offload_train=true")
    assert moved.is_offloaded(), "offloaded from the start"
    first = moved.pool.train_step(some)
    cost = moved.pool.memory_numbers()
    # Each rank that sends keeps its weights for the sync, so each weight crosses twice a step; others keep nothing.
    senders = len(moved.pool.exporters()[0])
    assert senders == (1 if backend == "megatron" else N_RANKS)
    kept, weights = moved.device_bytes(), plain_bytes["params"] * senders // N_RANKS
    assert kept == {"params": weights, "grads": 0, "optimizer": 0}
    assert {"time/train/onload", "time/train/offload"} <= cost.keys()
    moved.export()
    assert moved.is_offloaded()
    after = moved.pool.memory_numbers()
    assert after["memory/moved_to_device"] == 0, "the sync reloads weights that the step could have kept"
    assert after["memory/moved_to_host"] * GIB * N_RANKS == pytest.approx(plain_bytes["params"], rel=1e-6)
    assert 0 < cost["time/train/barrier_wait_s"] <= cost["time/train/onload"] + cost["time/train/offload"]
    assert _rest(cost["memory/train/before_onload"]) == 0 < cost["memory/train/after_onload"]
    got = [numbers(first), numbers(moved.pool.evaluate(some, meta=KEEP))]
    assert moved.device_bytes()["params"] > 0 == moved.device_bytes()["optimizer"], (
        "an evaluation reloads only the weights"
    )
    moved.export()
    got.append(numbers(moved.pool.train_step(some, meta=KEEP)))
    assert got == expected and moved.device_bytes()["optimizer"] > 0
    moved.export()
    _logprobs_need_the_weights(moved, some)
    assert moved.pool.train_step(some, meta={"is_offload_states": True}).loss > 0 and moved.is_offloaded()
    moved.pool.offload_states()
    assert moved.is_offloaded()
    _states_after_an_error(moved, some)


def _logprobs_need_the_weights(actor: Actor, some: list[ScoredChunk]) -> None:
    actor.pool.offload_states()
    actor.pool.memory_numbers()
    before = actor.pool.compute_logprobs(some).wait()
    assert actor.is_offloaded()
    after = actor.pool.compute_logprobs(some, meta=KEEP).wait()
    assert [[table.tolist() for table in chunk] for chunk in before] == [[t.tolist() for t in c] for c in after]
    assert actor.device_bytes()["params"] > 0 == actor.device_bytes()["optimizer"]
    assert {"time/logprobs/onload", "time/logprobs/offload"} <= actor.pool.memory_numbers().keys()
    with pytest.raises(ClusterError, match="disable_adapter"):
        actor.pool.compute_logprobs(some, meta={"disable_adapter": True})


def _rest(allocated: float) -> float:
    """Return what is allocated without states: on a card also workspaces of libraries, which are not counted here."""
    return 0 if on_cuda() else allocated


def _moves_explicitly(actor: Actor) -> None:
    before, metrics = actor.device_bytes(), dict[str, float]()
    with state_offload_manager(actor.pool, metrics, "block", include=["params"]):
        assert actor.pool.allocated_bytes() * N_RANKS >= sum(before.values())
    assert actor.is_offloaded() and _rest(actor.pool.allocated_bytes()) == 0
    assert metrics["memory/block/before_offload"] > metrics["memory/block/after_offload"]
    assert _rest(metrics["memory/block/after_offload"]) == 0
    actor.pool.reload_states()
    pending = actor.pool.offload_states(["optimizer"], blocking=False)
    pending.wait()
    pending.wait()
    assert actor.device_bytes() == before | {"optimizer": 0}
    actor.pool.offload_states()
    actor.pool.offload_states()
    assert actor.is_offloaded()
    back = actor.pool.reload_states(["params"], blocking=False)
    back.wait()
    assert actor.device_bytes() == dict.fromkeys(KINDS, 0) | {"params": before["params"]}
    with pytest.raises(ClusterError, match="params, grads, optimizer"):
        actor.pool.offload_states(["weights"])
    actor.pool.offload_states()


def _states_after_an_error(actor: Actor, some: list[ScoredChunk]) -> None:
    """Check that after an error in a call the states are where the call specified, and can be moved as before."""
    ray.get([worker.poison.remote() for worker in actor.workers])
    for meta, offloaded in ((None, True), (KEEP, False)):
        with pytest.raises(NumericsError):
            actor.pool.train_step(some, meta=meta)
        assert actor.is_offloaded() == offloaded
    with pytest.raises(ValueError, match=r"\bis_offload\b"):
        actor.pool.evaluate(some, meta={"is_offload": True})


# Frozen models. Student, teacher and reference are in host memory.


@pytest.fixture(scope="module")
def host_actor(ranks: list[Any], model: Path) -> Actor:
    local = ("teacher.backend=local", f"teacher.path={model}", "teacher.topk=4")
    on_host = ("actor.strategy=fsdp2", "actor.fsdp_cpu_offload=true", "actor.offload_train=true")
    made = Actor(ranks, model, *on_host, "distill.reference_kl_weight=0.1", *local)
    made.pool.init_reference(120)
    made.pool.init_teacher(120)
    return made


@pytest.fixture(scope="module")
def endpoints(host_actor: Actor) -> list[Any]:
    endpoint = ray.remote(concurrency_groups={RECORDS: 1})(GroupEndpoint)
    return [endpoint.options(num_cpus=0).remote(host_actor.config) for _ in range(N_RANKS)]


@pytest.fixture(scope="module")
def reference(host_actor: Actor, endpoints: list[Any]) -> ReferencePool:
    return ReferencePool(host_actor.workers, endpoints, host_actor.config)


def logprobs(chunks: list[ScoredChunk]) -> list[list[np.ndarray]]:
    return [[np.array(table) for table in chunk] for chunk in ray.get([chunk.reference for chunk in chunks])]


def same(one: list[list[np.ndarray]], two: list[list[np.ndarray]]) -> bool:
    return all(np.array_equal(a, b) for x, y in zip(one, two, strict=True) for a, b in zip(x, y, strict=True))


def changed(chunk: ScoredChunk, rollouts: list[Rollout], **fields: Any) -> ScoredChunk:
    return replace(chunk, rollouts=replace(chunk.rollouts, ref=ray.put(rollouts), **fields))


def test_an_actor_before_its_first_step_is_its_reference(host_actor: Actor, reference: ReferencePool) -> None:
    """Fails if the actor's logprobs reach other sequences, are of other tokens, or need scores."""
    pending = [PendingScores(chunk.rollouts, None, None) for chunk in batch()]
    found = host_actor.pool.compute_logprobs(pending, blocking=False)
    wanted = logprobs(reference.compute_logprobs(batch()).wait(batch()))
    for own, other in zip(found.wait(), wanted, strict=True):
        for one, two in zip(own, other, strict=True):
            np.testing.assert_allclose(one, two, atol=1e-5)
            assert one.dtype == np.float32


def test_states_on_the_host_stay_there(host_actor: Actor, reference: ReferencePool) -> None:
    """Fails if actor.fsdp_cpu_offload does not reach the students, or actor.offload_train moves their states anyway."""
    scored = batch()
    chunks = reference.compute_logprobs(scored).wait(scored)
    for _ in range(2):
        assert host_actor.pool.train_step(chunks).grad_norm > 0
        assert host_actor.device_bytes() == dict.fromkeys(KINDS, 0)
    assert not [name for name in host_actor.pool.memory_numbers() if name.startswith("time/train/")]


def test_non_blocking_calls_and_errors(reference: ReferencePool) -> None:
    """Fails if a handle cannot be waited for twice, a bad sequence of one rank hangs the others, or it affects the next
    call.
    """
    good = batch()
    expected = logprobs(reference.compute_logprobs(good).wait(good))
    pending = reference.compute_logprobs(good, blocking=False)
    assert same(logprobs(pending.wait(good, 60)), expected) and same(logprobs(pending.wait(good, 60)), expected)
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


def test_local_scores_reach_their_sequences(host_actor: Actor, endpoints: list[Any]) -> None:
    """Fails if scores reach other sequences when a chunk is split over the ranks, or a chunk is scored twice."""
    scoring = LocalScoring(lambda: host_actor.workers, endpoints, timeout_s=60.0)
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
        assert found.topk.ids.shape == (len(rollout.response_ids), 4)
        np.testing.assert_allclose(found.topk.logprobs, wanted.topk.logprobs, atol=1e-5)
    one, two = (score.topk.logprobs for score in scores[:2])
    assert np.abs(one - two).max() > 1e-3, "sequences must have different scores for this test to be meaningful"
    assert scored.teacher_mass is not None and 0 < scored.teacher_mass <= sum(len(r.response_ids) for r in joined)


# Engines that are started again.


def _engine() -> Any:
    return ray.remote(DictEngine).options(num_cpus=0).remote()


def _engines(n: int) -> list[Any]:
    """Start engines; return them when their processes have imported what they need."""
    found = [_engine() for _ in range(n)]
    ray.get([engine.state.remote() for engine in found], timeout=400)
    return found


@pytest.fixture(scope="module")
def synced(ranks: list[Any], tmp_path_factory: pytest.TempPathFactory) -> Actor:
    """Return an actor whose weights have several buckets."""
    folder = tmp_path_factory.mktemp("larger")
    save_model(folder, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4, head_dim=64)
    sync = ("weight_sync.verify=never", "trainer.stage_timeout_s=240", "weight_sync.bucket_mib=1")
    return Actor(ranks, folder, "actor.strategy=fsdp2", *sync)


def _with(config: Config, **weight_sync: Any) -> Config:
    return replace(config, weight_sync=replace(config.weight_sync, **weight_sync))


def _states(engines: list[Any]) -> list[tuple[int, dict[str, str]]]:
    return ray.get([engine.state.remote() for engine in engines], timeout=240)


@ON_CPU
def test_a_restarted_engine_gets_the_last_weights_while_the_others_work(synced: Actor, tmp_path: Path) -> None:
    """Fails if it gets other weights than the last push, waits for the actor or an engine, or breaks later pushes."""
    engines = _engines(2)
    sync = WeightSync(synced.pool.exporters(), engines, synced.config, "cpu", 240)
    ray.kill(engines[1])
    engines[1] = _engine()
    assert sync.restore_engine(1, engines[1]) == 0, "before any push an engine has the weights of its folder"
    sync.push(3)
    synced.pool.train_step(batch())
    sync.push(4)
    (version, trained), _ = _states(engines)
    assert version == 4 and trained

    ray.kill(engines[1])
    engines[1] = _engine()
    until = tmp_path / "restored"
    busy = [worker.wait_for.remote(until) for worker in (*synced.workers, engines[0])]
    assert sync.restore_engine(1, engines[1]) == 4
    until.touch()
    ray.get(busy, timeout=240)
    assert _states(engines) == [(4, trained)] * 2

    synced.pool.train_step(batch())
    sync.push(5)
    first, second = _states(engines)
    assert first == second and first[0] == 5 and first[1] != trained


@ON_CPU
def test_a_push_in_which_an_engine_dies_can_be_repeated(synced: Actor) -> None:
    """Fails if the other members wait for the time-out, or an engine keeps a mixture of two versions."""
    engines = _engines(3)
    sync = WeightSync(synced.pool.exporters(), engines, _with(synced.config, transport="gloo"), "cpu", 240)
    sync.push(1)
    synced.pool.train_step(batch())
    ray.get(engines[1].die_in_transfer.remote())
    with pytest.raises(WeightSyncError) as caught:
        sync.push(2)
    assert list(caught.value.lost) == [1] and isinstance(caught.value.lost[1], ClusterError)
    sync.push(2, {0: engines[0], 2: engines[2]})
    first, second = _states([engines[0], engines[2]])
    assert first == second and first[0] == 2
    sync.push(2)
    assert _states([engines[0]]) == [first], "the actor's ranks did not export in step"
    engines[1] = _engine()
    assert sync.restore_engine(1, engines[1]) == 2
    assert ray.get(engines[1].transports.remote()) == ["gloo"], "the setting holds for restarted engines, too"
    sync.push(3)
    assert [version for version, _ in _states(engines)] == [3, 3, 3]
    assert len({tuple(digests.items()) for _, digests in _states(engines)}) == 1


@ON_CPU
def test_a_sender_without_memory_is_the_cause(synced: Actor) -> None:
    """Fails if engines are blamed for an error of the actor, wait for a time-out, or the other ranks hang."""
    (engine,) = _engines(1)
    sync = WeightSync(synced.pool.exporters(), [engine], _with(synced.config, bucket_mib=2), "cpu", 240)
    ray.get(synced.workers[0].limit_memory.remote(1 << 16), timeout=240)
    began_s = time.monotonic()
    with pytest.raises(WeightSyncError, match="weight_sync.transport") as caught:
        sync.push(1)
    assert not caught.value.lost and time.monotonic() - began_s < 120.0
    ray.get(synced.workers[0].limit_memory.remote(-1), timeout=240)
    sync.push(1)
    state = _states([engine])
    sync.push(1)
    assert _states([engine]) == state
