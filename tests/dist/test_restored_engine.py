"""An engine that is started again gets the last weights while the actor and the other engine are busy.

The actor's ranks are the product's. An engine is a Ray actor with the product's transfer and a dict as its model.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray

from gkd.config.schema import Config
from gkd.errors import ClusterError, WeightSyncError
from gkd.rollout.driver.weight_sync import WeightSync
from tests.bench.student_case import save_model
from tests.dist.dict_engine import DictEngine
from tests.dist.slots import actor_slots
from tests.dist.test_offload import N_RANKS, Actor, batch

pytestmark = [pytest.mark.dist, pytest.mark.cpu_only("Ray's slots are logical CPUs")]


def _engine() -> Any:
    return ray.remote(DictEngine).options(num_cpus=0).remote()


def _engines(n: int) -> list[Any]:
    """Start engines; return them when their processes have imported what they need."""
    found = [_engine() for _ in range(n)]
    ray.get([engine.state.remote() for engine in found], timeout=150)
    return found


@pytest.fixture(scope="module")
def actor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Actor]:
    folder = tmp_path_factory.mktemp("model")
    save_model(folder, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4, head_dim=64)
    with actor_slots(N_RANKS) as slots:
        sync = ("weight_sync.verify=never", "weight_sync.timeout_s=60", "weight_sync.bucket_mib=1")
        yield Actor(slots, folder, "actor.strategy=fsdp2", *sync)


def _with(config: Config, **weight_sync: Any) -> Config:
    return replace(config, weight_sync=replace(config.weight_sync, **weight_sync))


def _states(engines: list[Any]) -> list[tuple[int, dict[str, str]]]:
    return ray.get([engine.state.remote() for engine in engines], timeout=60)


def test_a_restarted_engine_gets_the_last_weights_while_the_others_work(actor: Actor, tmp_path: Path) -> None:
    """Fails if it gets other weights than the last push, waits for the actor or an engine, or breaks later pushes."""
    engines = _engines(2)
    sync = WeightSync(actor.pool.exporters(), engines, actor.config, "cpu", 60)
    ray.kill(engines[1])
    engines[1] = _engine()
    assert sync.restore_engine(1, engines[1]) == 0, "before any push an engine has the weights of its folder"
    sync.push(3)
    actor.pool.train_step(batch())
    sync.push(4)
    (version, trained), _ = _states(engines)
    assert version == 4 and trained

    ray.kill(engines[1])
    engines[1] = _engine()
    until = tmp_path / "restored"
    busy = [worker.wait_for.remote(until) for worker in (*actor.workers, engines[0])]
    assert sync.restore_engine(1, engines[1]) == 4
    until.touch()
    ray.get(busy, timeout=60)
    assert _states(engines) == [(4, trained)] * 2

    actor.pool.train_step(batch())
    sync.push(5)
    first, second = _states(engines)
    assert first == second and first[0] == 5 and first[1] != trained


def test_a_push_in_which_an_engine_dies_can_be_repeated(actor: Actor) -> None:
    """Fails if the other members wait for the time-out, or an engine keeps a mixture of two versions."""
    engines = _engines(3)
    sync = WeightSync(actor.pool.exporters(), engines, _with(actor.config, transport="gloo"), "cpu", 60)
    sync.push(1)
    actor.pool.train_step(batch())
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


def test_a_sender_without_memory_is_the_cause(actor: Actor) -> None:
    """Fails if engines are blamed for an error of the actor, wait for a time-out, or the other ranks hang."""
    (engine,) = _engines(1)
    sync = WeightSync(actor.pool.exporters(), [engine], _with(actor.config, bucket_mib=2), "cpu", 60)
    ray.get(actor.workers[0].limit_memory.remote(1 << 16), timeout=60)
    began_s = time.monotonic()
    with pytest.raises(WeightSyncError, match="weight_sync.transport") as caught:
        sync.push(1)
    assert not caught.value.lost and time.monotonic() - began_s < 45.0
    ray.get(actor.workers[0].limit_memory.remote(-1), timeout=60)
    sync.push(1)
    state = _states([engine])
    sync.push(1)
    assert _states([engine]) == state
