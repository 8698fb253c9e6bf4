"""Test the restart policy of rollout engines: which are up, how often one is restarted, and what ends the run."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Set
from typing import Any

import pytest

from gkd.config.schema_rollout import RolloutConfig
from gkd.errors import EngineFailed, GkdError, OutOfMemory, RankFailed, RankTimeout, SenderFailed, WeightSyncError
from gkd.rollout.driver.recovery import Engines
from gkd.types import EngineRestarts
from tests.processes import wait_until

SOON_S = 20.0


class Slots:
    """Starts handles "engine 0 process 1" instead of processes, and fails as told."""

    def __init__(self) -> None:
        self.started: list[tuple[int, int]] = []
        self.errors: list[GkdError | None] = []  # of the next starts
        self.entered = threading.Event()
        self.gate = threading.Event()  # a start waits for it
        self.gate.set()

    def start(self, index: int, attempt: int) -> Any:
        self.entered.set()
        assert self.gate.wait(SOON_S)
        self.started.append((index, attempt))
        error = self.errors.pop(0) if self.errors else None
        if error is not None:
            raise error
        return f"engine {index} process {attempt}"

    def close(self, indices: Set[int]) -> None:
        self.closed = set(indices)
        self.gate.set()

    def card(self, index: int) -> str:
        return f"host7, GPU {index + 4}"


def pool(
    n: int = 2, max_restarts: int = 1, restore: Callable[[int, Any], int] = lambda index, worker: 3
) -> tuple[Engines, Slots]:
    engines, slots = Engines([f"engine {i}" for i in range(n)], RolloutConfig(max_restarts=max_restarts)), Slots()
    engines.recover_with(slots, restore)
    return engines, slots


def until(condition: Callable[[], object]) -> None:
    wait_until(condition, SOON_S, "the pool")


DIED = RankFailed("the process died")


def test_a_lost_engine_comes_back_as_a_new_handle_with_the_current_weights() -> None:
    """Fails if a restarted engine is called before it holds the weights, or the others wait for it."""
    restored: list[tuple[int, Any, dict[int, Any]]] = []

    def restore(index: int, worker: Any) -> int:
        restored.append((index, worker, engines.up()))
        return 3

    engines, slots = pool(restore=restore)
    slots.gate.clear()
    engines.lost(1, "engine 1", DIED, n_prompts=5)
    assert engines.up() == {0: "engine 0"}, "the other engine goes on"
    slots.gate.set()
    until(lambda: len(engines.up()) == 2)
    assert engines.up()[1] == "engine 1 process 1"
    assert restored == [(1, "engine 1 process 1", {0: "engine 0"})]
    done = engines.take_restarts()
    assert (done.restarts, done.prompts) == (1, 5) and done.seconds > 0
    assert engines.take_restarts() == EngineRestarts()


def test_a_death_is_counted_once_however_many_calls_report_it() -> None:
    """Fails if two pending calls on one dead process use up two restarts, or a late report hits the new process."""
    engines, slots = pool()
    for _ in range(3):
        engines.lost(0, "engine 0", DIED)
    until(lambda: 0 in engines.up())
    engines.lost(0, "engine 0", DIED)  # an old call
    assert slots.started == [(0, 1)] and len(engines.up()) == 2


def test_one_failure_more_than_allowed_names_the_card() -> None:
    """Fails if a bad card is restarted for ever, or ends the run without its name."""
    max_restarts = 2
    engines, slots = pool(max_restarts=max_restarts)
    for _ in range(max_restarts):
        engines.lost(1, engines.wait_up(SOON_S)[1], DIED)
        until(lambda: 1 in engines.up())
    engines.lost(0, "engine 0", DIED)  # each engine has its own count
    until(lambda: 0 in engines.up())
    engines.lost(1, engines.up()[1], DIED)
    with pytest.raises(EngineFailed) as caught:
        engines.check()
    assert "host7, GPU 5" in str(caught.value) and str(max_restarts + 1) in str(caught.value)
    with pytest.raises(EngineFailed):
        engines.wait_up(SOON_S)
    assert set(engines.up()) == {0}, "what is left of the pool can be offloaded and asked for its numbers"


def test_an_error_that_would_come_again_is_not_tried_again() -> None:
    """Fails if an engine is restarted for what it cannot compute, or if two deaths count as the same error."""
    engines, slots = pool(max_restarts=9)
    for error in (DIED, DIED, RankFailed("failed", "RuntimeError: a"), RankFailed("failed", "RuntimeError: b")):
        engines.lost(0, engines.up()[0], error)
        until(lambda: 0 in engines.up())
    assert len(slots.started) == 4
    engines.lost(0, engines.up()[0], RankFailed("failed", "RuntimeError: b"))
    for lasting in ("ValueError: x", "torch.errors.NotImplementedError: x"):
        other, not_started = pool(max_restarts=9)
        other.lost(1, "engine 1", RankFailed("failed", lasting))
        with pytest.raises(EngineFailed):
            other.check()
        assert not not_started.started
    with pytest.raises(EngineFailed):
        engines.check()


def test_waiting_for_an_engine_has_an_end() -> None:
    """Fails if a pool without a ready engine hangs, or the engine that is ready later is not used."""
    engines, slots = pool(n=1)
    slots.gate.clear()
    engines.lost(0, "engine 0", DIED)
    pushed: list[Mapping[int, Any]] = []
    for wait in (engines.wait_up, lambda timeout_s: engines.sync(pushed.append, timeout_s)):
        with pytest.raises(RankTimeout, match="0.1 s"):
            wait(0.1)
    slots.gate.set()
    assert engines.wait_up(SOON_S) == {0: "engine 0 process 1"}
    engines.sync(pushed.append, SOON_S)
    assert pushed == [{0: "engine 0 process 1"}]


@pytest.mark.parametrize("error", [DIED, WeightSyncError("digests differ")])
def test_a_death_during_the_restart_counts(error: GkdError) -> None:
    """Fails if an engine that dies while it starts is lost for good, or is started again for ever."""
    engines, slots = pool(max_restarts=2)
    slots.errors = [error]
    engines.lost(0, "engine 0", DIED)
    until(lambda: 0 in engines.up())
    assert slots.started == [(0, 1), (0, 2)] and engines.up()[0] == "engine 0 process 2"
    engines, slots = pool(n=1, max_restarts=2)
    slots.errors = [error, error]
    engines.lost(0, "engine 0", DIED)
    with pytest.raises(EngineFailed):
        engines.wait_up(SOON_S)
    assert slots.started == [(0, 1), (0, 2)]


@pytest.mark.parametrize("error", [OutOfMemory("no room for the KV cache"), SenderFailed("actor rank 1 died")])
def test_an_error_that_would_come_again_ends_the_run_at_once(error: GkdError) -> None:
    """Fails if a restart that runs out of memory is repeated, or a dead actor rank is blamed on the engine."""
    engines, slots = pool(n=1, max_restarts=5)
    slots.errors = [error]
    engines.lost(0, "engine 0", DIED)
    with pytest.raises(type(error)):
        engines.wait_up(SOON_S)
    assert slots.started == [(0, 1)]


def test_a_bug_in_the_restart_is_raised_where_the_engine_is_needed() -> None:
    """Fails if the loop waits for ever for an engine whose restart broke."""
    engines, slots = pool(n=1)
    slots.errors = [ValueError("bug")]  # type: ignore[list-item]
    engines.lost(0, "engine 0", DIED)
    with pytest.raises(RankFailed, match="ValueError"):
        engines.wait_up(SOON_S)


def test_without_restarts_and_during_the_start_the_first_failure_is_raised() -> None:
    """Fails if rollout.max_restarts: 0, or a failure before the pools are ready, does not end the run as it is."""
    engines, _ = pool(max_restarts=0)
    with pytest.raises(RankFailed) as caught:
        engines.lost(0, "engine 0", DIED)
    assert caught.value is DIED
    with pytest.raises(RankFailed):
        Engines(["engine 0"], RolloutConfig(max_restarts=5)).lost(0, "engine 0", DIED)


def test_a_restarted_engine_does_not_join_during_a_weight_sync() -> None:
    """Fails if an engine joins between the transfer to the others and its end: it would hold an older version."""
    versions: list[int] = []
    pushed = [3]
    engines, _ = pool(restore=lambda index, worker: versions.append(pushed[0]) or pushed[0])  # type: ignore[func-returns-value]

    def push(members: Mapping[int, Any]) -> None:
        assert set(members) == {0, 1}
        engines.lost(1, "engine 1", DIED)
        time.sleep(0.1)
        assert set(engines.up()) == {0} and not versions
        pushed[0] = 4

    engines.sync(push, SOON_S)
    until(lambda: len(engines.up()) == 2)
    assert versions == [4]


def test_a_weight_sync_waits_for_an_engine_and_not_for_one_that_failed_for_good() -> None:
    """Fails if a push without engines loses a version, or the step before the end of the run is not finished."""
    engines, slots = pool(n=1)
    engines.lost(0, "engine 0", DIED)
    assert engines.sync(dict, SOON_S) == {0: "engine 0 process 1"}
    engines.lost(0, "engine 0 process 1", DIED)
    with pytest.raises(EngineFailed):
        engines.check()
    assert engines.sync(dict, SOON_S) is None


class Died(WeightSyncError):
    def __init__(self, *indices: int) -> None:
        super().__init__("engines died during the transfer")
        self.lost = {index: DIED for index in indices}


def test_a_push_is_repeated_without_the_engines_that_died_in_it() -> None:
    """Fails if an engine that dies during a weight sync ends the run, or the others keep an incomplete version."""
    pushes: list[set[int]] = []

    def push(members: Mapping[int, Any]) -> str:
        pushes.append(set(members))
        if len(pushes) < 3:
            raise Died(len(pushes))
        return "version 4"

    engines, slots = pool(n=4)
    slots.gate.clear()
    assert engines.sync(push, SOON_S) == "version 4"
    assert pushes == [{0, 1, 2, 3}, {0, 2, 3}, {0, 3}]
    slots.gate.set()
    until(lambda: len(engines.up()) == 4)


def test_an_engine_without_a_complete_version_waits_for_the_next_push() -> None:
    """Fails if an engine generates with the weights of its folder, because all engines died during a push."""
    pushes: list[set[int]] = []

    def push(members: Mapping[int, Any]) -> str:
        pushes.append(set(members))
        assert len(pushes) == 1 or engines.up() == {}
        if len(pushes) == 1:
            raise Died(0)
        return "version 4"

    engines, _ = pool(n=1, restore=lambda index, worker: None)
    assert engines.sync(push, SOON_S) == "version 4"
    assert pushes == [{0}, {0}] and engines.up() == {0: "engine 0 process 1"}


def test_a_failed_transfer_without_a_dead_engine_is_raised() -> None:
    """Fails if a transfer that is wrong for another reason is repeated for ever."""

    def push(members: Mapping[int, Any]) -> None:
        raise Died()

    engines, _ = pool()
    with pytest.raises(WeightSyncError):
        engines.sync(push, SOON_S)
    assert engines.sync(dict, SOON_S) == {0: "engine 0", 1: "engine 1"}, "the next one may begin"


def test_no_engine_starts_while_another_pool_has_the_gpus() -> None:
    """Fails if a colocated engine starts on a GPU that the training step fills, or never starts."""
    engines, slots = pool()
    engines.lost(0, "engine 0", DIED)
    engines.hold()  # lets the running restart finish
    assert len(engines.up()) == 2
    slots.entered.clear()
    engines.lost(1, "engine 1", DIED)
    assert not slots.entered.wait(0.05)
    engines.release()
    until(lambda: len(engines.up()) == 2)
    only, slots = pool(n=1)
    only.hold()
    only.lost(0, "engine 0", DIED)
    assert only.sync(dict, SOON_S) == {0: "engine 0 process 1"}, "nobody else could receive the weights"


def test_nothing_starts_after_the_pools_are_closed() -> None:
    """Fails if Ctrl-C during a restart leaves an engine behind, blocks the end, or leaves a thread that calls Ray."""
    engines, slots = pool()
    slots.gate.clear()
    slots.errors = [RankFailed("killed by the end of the run")]
    engines.lost(0, "engine 0", DIED)
    assert slots.entered.wait(SOON_S)
    engines.close()
    assert slots.closed == {0} and not any(thread.name.startswith("restart ") for thread in threading.enumerate())
    assert slots.started == [(0, 1)] and engines.up() == {1: "engine 1"}
    engines.lost(1, "engine 1", DIED)
    assert slots.started == [(0, 1)]
    engines.check()


def test_an_engine_that_dies_as_soon_as_it_is_up_is_started_again() -> None:
    """Fails if a death between coming up and the end of the restart is lost: the engine would stay down for ever."""
    engines, slots = pool(n=1, max_restarts=30)
    engines.on_up(lambda: engines.lost(0, engines.up().get(0), DIED) if len(slots.started) < 20 else None)
    engines.lost(0, "engine 0", DIED)
    until(lambda: len(slots.started) == 20 and engines.up())
    assert [attempt for _, attempt in slots.started] == list(range(1, 21))


def test_callbacks_learn_of_every_end_of_a_wait() -> None:
    """Fails if a thread that waits for an engine without polling sleeps through its restart or its failure."""
    engines, slots = pool(n=1)
    seen: list[dict[int, Any]] = []
    engines.on_up(lambda: seen.append(engines.up()))
    engines.lost(0, "engine 0", DIED)
    until(lambda: {0: "engine 0 process 1"} in seen)
    engines.lost(0, "engine 0 process 1", DIED)
    until(lambda: seen[-1] == {})
