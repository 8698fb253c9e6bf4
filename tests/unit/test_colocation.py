"""GPU time-sharing of actor and engines, against roles that record their calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest

from gkd.metrics.run_metrics import StepMetrics
from gkd.pipeline.colocation import GpuSharing


class Recorded:
    """A role that records its calls."""

    def __init__(self, name: str, calls: list[str]) -> None:
        self._name, self._calls = name, calls

    def offload_states(self, include: Sequence[str] | None = None, level: int = 1) -> None:
        self._calls.append(f"offload {self._name} {level}")

    def reload_states(self, include: Sequence[str] | None = None) -> None:
        self._calls.append(f"reload {self._name}")


def sharing(calls: list[str], *, shared: bool) -> GpuSharing:
    return GpuSharing(cast(Any, Recorded("actor", calls)), cast(Any, Recorded("engines", calls)), shared=shared)


def test_one_side_offloads_before_the_other_reloads() -> None:
    """Fails if both models are on a GPU that holds one, or weights are copied although new ones follow."""
    calls: list[str] = []
    gpus = sharing(calls, shared=True)
    with gpus.for_rollout():
        assert calls == ["offload actor 1", "reload engines"]
        calls.clear()
    with gpus.for_training():
        assert calls == ["offload engines 1"]
        calls.clear()
    with gpus.for_training(new_weights_follow=True):
        assert calls == ["offload engines 2"]


@pytest.mark.parametrize(("shared", "needed"), [(False, True), (True, False)])
def test_nothing_moves_without_need(shared: bool, needed: bool) -> None:
    """Fails if disjoint pools, or a replay that generates nothing, pay for switches."""
    calls: list[str] = []
    m = StepMetrics(1)
    with sharing(calls, shared=shared).for_rollout(m, needed=needed):
        pass
    if not shared:
        with sharing(calls, shared=shared).for_training(m, new_weights_follow=True):
            pass
    assert calls == [] and "time/switch_s" not in m.stage.report()


def test_a_switch_is_a_stage() -> None:
    """Fails if the time of a switch is not reported, or the stages inside the block cannot be measured."""
    m = StepMetrics(1)
    with sharing([], shared=True).for_rollout(m), m.stage("rollout"):
        pass
    assert {"time/switch_s", "time/rollout_s"} <= m.stage.report().keys()


def test_errors_pass_through() -> None:
    """Fails if an error in the block is lost."""
    with pytest.raises(KeyError), sharing([], shared=True).for_training():
        raise KeyError
