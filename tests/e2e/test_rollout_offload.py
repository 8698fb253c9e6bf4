"""Offloading of the real rollout pool: two engines, one trainer rank, weight syncs to sleeping engines."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import ray

from gkd.actor import worker as actor_worker
from gkd.actor.pool import ActorPool
from gkd.actor.worker import ActorWorker
from gkd.cluster.calls import gather
from gkd.cluster.cluster import Cluster
from gkd.cluster.placement import PoolSpec
from gkd.config.load import load_config
from gkd.errors import ClusterError, RankTimeout
from gkd.rollout.driver.pool import RolloutPool
from gkd.rollout.engine import worker as rollout_worker
from gkd.rollout.engine.worker import RolloutWorker
from gkd.start.worker_env import worker_env
from gkd.types import Prompt
from gkd.weight_sync.coordinator import WeightSync
from tests.e2e.conftest import EOS, VOCAB, Lab

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
N_ENGINES = 2
Held = dict[str, dict[str, int]]


@dataclass
class Pools:
    rollout: RolloutPool
    sync: WeightSync

    def responses(self) -> list[tuple[int, bytes, bytes]]:
        """Return sample index, tokens and logprobs, as bytes."""
        rng = np.random.default_rng(5)
        prompts = [Prompt(i, rng.integers(2, VOCAB, 3 + i).astype(np.int32)) for i in range(8)]
        chunks = self.rollout.generate(prompts, prompt_indices=range(8), n=2, temperature=0.7, seed=3)
        rollouts = [rollout for chunk in chunks for rollout in ray.get(chunk.ref)]
        return sorted((r.sample_index, r.response_ids.tobytes(), r.rollout_logprobs.tobytes()) for r in rollouts)


@pytest.fixture(scope="module")
def pools(lab: Lab) -> Iterator[Pools]:
    settings = lab.command(lab.root / "offload_run", 1)[5:]
    sizes = [f"rollout.n_gpus_per_node={N_ENGINES}", "rollout.max_num_seqs=8", "rollout.kv_cache_mib=64"]
    config = load_config(None, [*settings, *sizes, "weight_sync.verify=always"])
    cluster = Cluster("", n_slots=N_ENGINES + 1, on_cpu=True)
    try:
        specs = [PoolSpec("actor", 1, 1, gpus_per_worker=1), PoolSpec("rollout", 1, N_ENGINES, gpus_per_worker=1)]
        slots = cluster.make_pools(specs, 60)
        env = worker_env(on_cpu=True)
        actor = ActorPool(
            slots["actor"].spawn(ActorWorker, env, concurrency_groups=actor_worker.CONCURRENCY_GROUPS), config
        )
        engines = slots["rollout"].spawn(RolloutWorker, env, concurrency_groups=rollout_worker.CONCURRENCY_GROUPS)
        rollout = RolloutPool(engines, config, 1)
        gather(rollout.init_model("cpu", [EOS], sleeps=True) | actor.init_model("cpu", 4, 200), "init_model", 200)
        yield Pools(rollout, WeightSync(actor.exporters(), rollout.workers, config, "cpu", 200))
    finally:
        cluster.close()


def _sums(held: Held) -> dict[str, int]:
    assert sorted(held) == [f"rollout engine {i}" for i in range(N_ENGINES)]
    return {state: sum(engine[state] for engine in held.values()) for state in ("params", "kv_cache")}


def test_calls_reload_the_states_they_need(pools: Pools) -> None:
    """Fails if a call on sleeping engines fails, returns other responses or reloads unneeded states, or if a sync does
    not restore discarded weights (verified by digests)."""
    rollout, sync = pools.rollout, pools.sync
    sync.push(1)
    before = pools.responses()
    awake = _sums(rollout.reload_states().wait())
    assert awake["kv_cache"] >= N_ENGINES * (63 << 20) and awake["params"] > N_ENGINES * (8 << 20)

    assert rollout.allocated_bytes() * N_ENGINES == sum(awake.values())
    assert _sums(rollout.offload_states().wait()) == {"params": 0, "kv_cache": 0}
    assert rollout.allocated_bytes() == 0
    assert pools.responses() == before
    assert _sums(rollout.offload_states(["kv_cache"]).wait()) == {**awake, "kv_cache": 0}

    pending: Any = rollout.offload_states(level=2, blocking=False)
    sync.push(2)  # runs after the offload
    assert _sums(pending.wait()) == _sums(pending.wait()) == {"params": 0, "kv_cache": 0}
    assert _sums(rollout.reload_states(["params"]).wait()) == {**awake, "kv_cache": 0}
    assert pools.responses() == before
    assert _sums(rollout.reload_states(blocking=False).wait(60)) == awake


def test_the_handle_raises_errors(pools: Pools) -> None:
    """Fails if an engine's error is lost, a late engine is not named, or an engine with an open stream is offloaded."""
    rollout = pools.rollout
    rollout.reload_states()
    pools.sync.push(3)
    with pytest.raises(ClusterError, match="'gradients'"):
        rollout.offload_states(["gradients"])
    later = rollout.offload_states(level=3, blocking=False)
    with pytest.raises(ClusterError, match="sleep level 3"):
        later.wait()
    stream = rollout.open_stream(n=1, temperature=1.0, seed=5)
    try:
        with pytest.raises(ClusterError, match=r"rollout engine \d .*offload_states"):
            rollout.offload_states()
    finally:
        stream.close()
    later = rollout.offload_states(blocking=False)
    with pytest.raises(RankTimeout) as raised:
        later.wait(0.0)
    assert {name.rpartition(" ")[0] for name in raised.value.late} == {"rollout engine"}
    assert _sums(later.wait()) == {"params": 0, "kv_cache": 0}
    assert rollout.greedy([Prompt(0, np.array([5, 6], np.int32), "w2")], n_samples=1).samples
