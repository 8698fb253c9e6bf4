"""Sleep state of a rollout engine: which tags are asleep, and whether its weights are valid."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from gkd.errors import ClusterError, ConfigError
from gkd.rollout.vllm.engine import PassMeter, RolloutEngine
from gkd.rollout.vllm.sleep_state import KV_CACHE, TAGS, WEIGHTS, SleepState, check_level


class Workers:
    """Record the calls of two workers; raise `error` if it is set."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.error: Exception | None = None

    def __call__(self, method: str, *args: Any) -> list[Any]:
        self.calls.append((method, *args))
        if self.error is not None:
            raise self.error
        return [{WEIGHTS: 3, KV_CACHE: 4}, {WEIGHTS: 30, KV_CACHE: 40}]


def test_only_awake_tags_are_released_and_only_sleeping_tags_are_restored() -> None:
    """Fails if a repeated call releases or restores memory twice, or the workers receive wrong remaining tags."""
    workers = Workers()
    state = SleepState(workers, enabled=True)
    state.wake_up(TAGS)
    assert state.awake_tags(TAGS) == list(TAGS)
    state.sleep([KV_CACHE], 1)
    assert state.awake_tags(TAGS) == [WEIGHTS]
    state.sleep([WEIGHTS], 1)
    assert state.awake_tags(TAGS) == []
    state.wake_up([WEIGHTS, WEIGHTS])
    state.wake_up([WEIGHTS])
    state.wake_up(TAGS)
    assert workers.calls == [
        ("gkd_sleep", [KV_CACHE], [WEIGHTS], 1),
        ("gkd_sleep", [WEIGHTS], [], 1),
        ("gkd_wake", [WEIGHTS], False),
        ("gkd_wake", [KV_CACHE], False),
    ]
    assert state.memory_bytes() == {WEIGHTS: 33, KV_CACHE: 44}


def test_discarded_weights_are_invalid_until_a_sync() -> None:
    """Fails if uninitialized weights count as valid after a partial wake-up or another sleep, or valid ones do not."""
    workers = Workers()
    state = SleepState(workers, enabled=True)
    state.sleep([KV_CACHE], 2)
    state.require_weights("generate")  # only the KV cache is asleep
    state.sleep([WEIGHTS], 2)
    state.wake_up([WEIGHTS])
    state.sleep([WEIGHTS], 1)  # copies uninitialized memory
    state.wake_up(TAGS)
    assert [call[-1] for call in workers.calls if call[0] == "gkd_wake"] == [True, True]
    with pytest.raises(ClusterError, match=r"level=2"):
        state.require_weights("generate")
    with state.loading(adapters=False):
        pass
    state.require_weights("generate")
    state.sleep([WEIGHTS], 1)
    state.wake_up(TAGS)
    state.require_weights("generate")
    assert workers.calls[-1] == ("gkd_wake", [WEIGHTS], False)


@pytest.mark.parametrize("adapters", [False, True])
def test_weights_are_a_mixture_after_a_failed_transfer(adapters: bool) -> None:
    """Fails if an engine generates with parts of two versions, or does not after the transfer is repeated."""
    state = SleepState(Workers(), enabled=False)
    with pytest.raises(RuntimeError), state.loading(adapters=adapters):
        raise RuntimeError("connection lost")
    assert not state.has_weights
    with pytest.raises(ClusterError):
        state.require_weights("generate")
    with state.loading(adapters=not adapters):
        pass
    assert not state.has_weights, "the other content has arrived, this one has not"
    with state.loading(adapters=adapters):
        pass
    assert state.has_weights
    state.require_weights("generate")


def test_an_engine_is_asleep_after_a_failed_move() -> None:
    """Fails if an engine in an unknown state is used, or cannot be woken up again."""
    workers = Workers()
    state = SleepState(workers, enabled=True)
    workers.error = RuntimeError("no memory")
    with pytest.raises(RuntimeError):
        state.sleep(TAGS, 1)
    with pytest.raises(RuntimeError):
        state.wake_up(TAGS)
    with pytest.raises(ClusterError, match=r"weights.*kv_cache"):
        state.require_awake(TAGS, "generate")
    workers.error = None
    state.wake_up(TAGS)
    state.require_awake(TAGS, "generate")
    assert workers.calls[-1] == ("gkd_wake", list(TAGS), False)


def test_unknown_levels_are_refused() -> None:
    """Fails if an unsupported level is silently ignored."""
    for level in (0, 3, "1"):
        with pytest.raises(ClusterError, match=f"sleep level {level!r}"):
            check_level(level)  # type: ignore[arg-type]
    disabled = SleepState(Workers(), enabled=False)
    with pytest.raises(ConfigError) as refused:
        disabled.awake_tags(TAGS)
    assert refused.value.key == "engines_sleep"
    disabled.wake_up(TAGS)


class EngineWithAdapters(RolloutEngine):
    """An engine of adapters without sequences, whose vLLM receives everything."""

    def __init__(self) -> None:
        core = SimpleNamespace(batch_queue=None, scheduler=SimpleNamespace(requests={}))
        engine = SimpleNamespace(engine_core=SimpleNamespace(engine_core=core))
        self.llm = SimpleNamespace(
            llm_engine=engine, collective_rpc=lambda *_, **__: [8], reset_prefix_cache=lambda **_: True
        )
        self.policy_version, self._running, self._meter = 0, {}, PassMeter()
        self.request_options = {"lora_request": "student"}
        self._vision = "none"
        self._sleep_state = SleepState(Workers(), enabled=False)


def test_an_engine_waits_for_the_adapters_of_a_version() -> None:
    """Fails if an engine generates between the base of a version and its adapters.

    A sync sends both after an engine was started again, while a stream is open. What the old adapters generate then
    would count as generated by the new version.
    """
    engine = EngineWithAdapters()
    for version in (1, 2):
        engine.receive([[]], version)
        assert not engine.has_weights
        engine.receive([[]], version, adapters=True)
        assert engine.has_weights
    engine.receive([[]], 3, adapters=True)
    assert engine.has_weights
