"""Turns of actor and engines on shared GPUs, against roles that note what they are asked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest

from gkd.metrics.writer import StageTimers
from gkd.pipeline.colocation import GpuSharing


class Noted:
    """A role that writes down its calls."""

    def __init__(self, name: str, calls: list[str]) -> None:
        self._name, self._calls = name, calls

    def offload_states(self, include: Sequence[str] | None = None, level: int = 1) -> None:
        self._calls.append(f"{self._name} away {level}")

    def reload_states(self, include: Sequence[str] | None = None) -> None:
        self._calls.append(f"{self._name} back")


def lease(calls: list[str], *, shared: bool) -> GpuSharing:
    return GpuSharing(cast(Any, Noted("actor", calls)), cast(Any, Noted("engines", calls)), shared=shared)


def test_one_side_goes_before_the_other_comes() -> None:
    """Fails if for a moment both sides' states are on a GPU that holds one, or new weights are copied away first."""
    calls: list[str] = []
    turns = lease(calls, shared=True)
    with turns.generating():
        assert calls == ["actor away 1", "engines back"]
        calls.clear()
    with turns.training():
        assert calls == ["engines away 1"]
        calls.clear()
    with turns.training(sync_follows=True):
        assert calls == ["engines away 2"]


def test_pools_of_their_own_are_left_alone() -> None:
    """Fails if a run whose pools are disjoint pays for turns that it does not take."""
    calls: list[str] = []
    timers = StageTimers()
    turns = lease(calls, shared=False)
    with turns.generating(timers), turns.training(timers, sync_follows=True):
        pass
    assert calls == [] and "time/switch_s" not in timers.report()


def test_a_switch_is_a_stage_of_its_own() -> None:
    """Fails if the time of the turns is nobody's, or the stages inside a turn cannot be timed."""
    timers = StageTimers()
    with lease([], shared=True).generating(timers), timers("rollout"):
        pass
    assert {"time/switch_s", "time/rollout_s"} <= timers.report().keys()


def test_errors_pass_through() -> None:
    """Fails if an error within a turn is lost, or the block is entered again."""
    with pytest.raises(KeyError), lease([], shared=True).training():
        raise KeyError
