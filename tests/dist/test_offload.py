"""Where the actor's states are between its calls. Real Ray actors with real students."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from gkd.actor.pool import ActorPool
from gkd.actor.worker import CONCURRENCY_GROUPS, ActorWorker
from gkd.cluster.calls import gather
from gkd.cluster.pool import Pool
from gkd.config.load import load_config
from gkd.data.chunks import chunk_sizes
from gkd.errors import ClusterError, NumericsError
from gkd.memory.offload_manager import GIB, state_offload_manager
from gkd.memory.states import KINDS
from gkd.start.pools import worker_env
from gkd.types import ScoredChunk, TeacherScores, TeacherTopK, TrainStats
from gkd.weight_sync.buckets import plan_buckets
from tests.bench.student_case import save_model, sequences
from tests.device import kind, on_cuda
from tests.dist.slots import actor_slots
from tests.processes import wait_until

pytestmark = pytest.mark.dist

N_RANKS = 2
KEEP = {"is_offload_states": False}


class Rank(ActorWorker):
    """A rank that reports what is on its device."""

    def device_bytes(self) -> dict[str, int]:
        return self._student.states.device_bytes()

    def wait_for(self, path: Path) -> None:
        """Be busy until the file exists."""
        wait_until(path.exists, 600.0, str(path))

    def limit_memory(self, n_bytes: int) -> None:
        """Limit the size of further files, also of those in memory; -1: no limit."""
        resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, -1))

    def poison(self) -> None:
        """Set all weights to NaN."""
        self._offload.reload_states()
        for tensor in self._student.live_states()["params"]:  # type: ignore[attr-defined]
            (tensor.to_local() if hasattr(tensor, "to_local") else tensor).fill_(float("nan"))
        self._offload.offload_states()


@pytest.fixture(scope="module")
def slots() -> Iterator[Pool]:
    with actor_slots(N_RANKS) as made:
        yield made


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_model(folder, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, head_dim=16)
    return folder


class Actor:
    """A pool whose ranks have a student."""

    def __init__(self, slots: Pool, model: Path, *overrides: str) -> None:
        base = ["data.train_files=[a]", f"model.path={model}", "model.dtype=float32", "trainer.run_dir=none"]
        sizes = [f"trainer.n_gpus_per_node={N_RANKS}", "actor.micro_batch_size=4", "actor.optim.lr=0.01"]
        self.workers = slots.spawn(Rank, worker_env(on_cpu=not on_cuda()), concurrency_groups=CONCURRENCY_GROUPS)
        self.config = load_config(None, [*base, *sizes, *overrides])
        self.pool = ActorPool(self.workers, self.config)
        gather(self.pool.init_model(kind(), 9, 120), "init_model", 120)

    def device_bytes(self) -> dict[str, int]:
        """Return the bytes on the devices of all ranks, by kind."""
        ranks = ray.get([worker.device_bytes.remote() for worker in self.workers])
        return {kind: sum(rank[kind] for rank in ranks) for kind in KINDS}

    def is_offloaded(self) -> bool:
        return not any(self.device_bytes().values())

    def export(self, meta: dict[str, Any] | None = None) -> None:
        """Export as a weight sync does, without a receiver. Some ranks may not take part."""
        (ranks,) = self.pool.exporters()
        plan = plan_buckets(ray.get(ranks[0].export_plan.remote("merged")), 1 << 20)
        sent = {str(i): worker.send_weights.remote(plan, False, **(meta or {})) for i, worker in enumerate(ranks)}
        gather(sent, "export", 60)

    def close(self) -> None:
        for worker in self.workers:
            ray.kill(worker)


def batch() -> list[ScoredChunk]:
    rollouts, scores = sequences("even")
    scores = [_descending(score) for score in scores]
    chunks = []
    for rank in range(N_RANKS):
        kept, scored = rollouts[rank:4:N_RANKS], scores[rank:4:N_RANKS]
        sizes = replace(chunk_sizes(rank, kept, 0), ref=ray.put(kept))
        chunks.append(ScoredChunk(sizes, ray.put(scored), 0.8, 0))
    return chunks


def _descending(scores: TeacherScores) -> TeacherScores:
    """Return the scores with the top-k sorted, as a teacher lists them."""
    assert scores.topk is not None
    order = np.argsort(-scores.topk.topk_logprobs, axis=1)
    ids, logprobs = (np.take_along_axis(t, order, 1) for t in (scores.topk.topk_ids, scores.topk.topk_logprobs))
    return TeacherScores(TeacherTopK(ids, logprobs, scores.topk.tail_mass))


def numbers(stats: TrainStats) -> tuple[Any, ...]:
    losses = {name: value for name, value in stats.extra.items() if name.startswith("loss/")}
    return stats.loss, stats.grad_norm, stats.n_loss_tokens, losses


@pytest.mark.parametrize("backend", ["megatron", pytest.param("fsdp2", marks=pytest.mark.slow)])
def test_states_are_where_the_settings_or_the_call_specify(slots: Pool, model: Path, backend: str) -> None:
    """Fails if states are elsewhere after a call than it specified, a call computes on offloaded states, a number
    changes, or a call of some ranks alone hangs.
    """
    some = batch()
    plain = Actor(slots, model, f"actor.strategy={backend}")
    try:
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
    finally:
        plain.close()
    moved = Actor(slots, model, f"actor.strategy={backend}", "actor.offload_train=true")
    try:
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
    finally:
        moved.close()


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
