"""Where states are between calls: `state_offload_manager`, its metrics, and what pools on shared GPUs leave out.

Their turns are in test_trainer.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from gkd.actor.offload import OffloadController
from gkd.config.load import load_config
from gkd.memory.offload_manager import GIB, state_offload_manager
from gkd.metrics.run_metrics import StepMetrics
from gkd.pipeline.colocation import GpuSharing
from gkd.roles import Roles
from tests.dist.helpers import group_of_one


class Recorder:
    """A strategy that records its calls."""

    def __init__(self) -> None:
        self.calls: list[object] = []
        self.offloaded: list[object] = []
        self.bytes = 0

    def offload_states(self, include: Sequence[str] | None = None) -> None:
        self.calls.append("offload")
        self.offloaded.append(include)
        self.bytes = 0

    def reload_states(self, include: Sequence[str] | None = None) -> None:
        self.calls.append(include)
        self.bytes = 3 * GIB

    def allocated_bytes(self) -> int:
        return self.bytes


def test_it_reloads_runs_and_offloads_and_measures() -> None:
    """Fails if a block runs without its states, they stay on the device after it, or a metric is missing."""
    strategy, metrics = Recorder(), {"loss/total": 1.0, "time/train/onload": 100.0}
    with state_offload_manager(strategy, metrics, "train", include=["params"]):
        assert strategy.calls == [["params"]]
        strategy.bytes += GIB
    assert strategy.calls == [["params"], "offload"]
    memory = {name: value for name, value in metrics.items() if name.startswith("memory/")}
    assert memory == {
        "memory/train/before_onload": 0.0,
        "memory/train/after_onload": 3.0,
        "memory/train/before_offload": 4.0,
        "memory/train/after_offload": 0.0,
    }
    assert {"time/train/execute", "time/train/offload"} <= metrics.keys()
    assert metrics["time/train/onload"] >= 100.0, "the seconds of two calls in a step add up"


def test_kinds_that_the_next_call_needs_stay_except_after_an_error() -> None:
    """Fails if a training step offloads weights that the sync reloads at once, or a failed step occupies the device."""
    strategy = Recorder()
    with state_offload_manager(strategy, {}, "train", offload=["grads", "optimizer"]):
        pass
    with pytest.raises(ArithmeticError), state_offload_manager(strategy, {}, "train", offload=["grads", "optimizer"]):
        raise ArithmeticError
    assert strategy.offloaded == [["grads", "optimizer"], None]


@pytest.mark.parametrize(("is_offload_states", "after"), [(True, ["offload"]), (False, [])])
def test_states_are_where_the_call_specifies(is_offload_states: bool, after: list[object]) -> None:
    """Fails if `is_offload_states` has no effect, also after an error in the block."""
    for fails in (False, True):
        strategy, metrics = Recorder(), dict[str, float]()
        try:
            with state_offload_manager(strategy, metrics, "train", is_offload_states):
                if fails:
                    raise ArithmeticError
        except ArithmeticError:
            assert fails
        assert strategy.calls == [None, *after]
        assert ("time/train/offload" in metrics) == is_offload_states
        assert metrics["memory/train/after_offload"] == (0.0 if is_offload_states else 3.0)


class Full(Recorder):
    """A strategy whose device or host has no memory."""

    def __init__(self, *fails: str) -> None:
        super().__init__()
        self.fails = fails

    def offload_states(self, include: Sequence[str] | None = None) -> None:
        super().offload_states()
        if "offload" in self.fails:
            raise MemoryError("host")

    def reload_states(self, include: Sequence[str] | None = None) -> None:
        super().reload_states(include)
        if "reload" in self.fails:
            raise MemoryError("device")


@pytest.mark.parametrize("is_offload_states", [True, False])
def test_a_failed_reload_leaves_states_where_the_call_specifies(is_offload_states: bool) -> None:
    """Fails if states that were reloaded before the error stay on a device that other processes need."""
    strategy = Full("reload")
    with pytest.raises(MemoryError, match="device"), state_offload_manager(strategy, {}, "train", is_offload_states):
        raise AssertionError("the block runs without its states")
    assert strategy.calls == ([None, "offload"] if is_offload_states else [None])


def test_the_first_error_is_raised() -> None:
    """Fails if an error of the block or of the reload is replaced by one of the offload after it."""
    for fails, first in ((["offload"], "block"), (["reload", "offload"], "device")):
        with pytest.raises((ArithmeticError, MemoryError), match=first), state_offload_manager(Full(*fails), {}, "x"):
            raise ArithmeticError("block")
    with pytest.raises(MemoryError, match="host"), state_offload_manager(Full("offload"), {}, "x"):
        pass


class Controller(OffloadController):
    """Its device holds these bytes."""

    n_bytes = 0

    def allocated_bytes(self) -> int:
        return self.n_bytes


def test_resident_models_are_not_a_leak(gkd_log: pytest.LogCaptureFixture) -> None:
    """Fails if every run with a resident teacher logs a leak, or a real leak is not logged because of the teacher."""
    on_device = [0]
    student: Any = SimpleNamespace(states=SimpleNamespace(allocated_bytes=lambda: on_device[0]))
    with group_of_one():
        cpu = torch.device("cpu")
        controller = Controller(student, cpu, automatic=True, timeout_s=1.0, resident_bytes=lambda: GIB)
        resident = [(0, GIB), (0, GIB + GIB // 2), (0, GIB + GIB // 2), (0, 2 * GIB)]
        for on_device[0], controller.n_bytes in (*resident, (1, 9 * GIB)):
            controller._warn_of_leak()
    leaks = [record.args[0] for record in gkd_log.records if isinstance(record.args, tuple)]
    assert leaks == [0.5, 1.0], "states on the device are not a leak"


class Recorded:
    """A role that records its calls."""

    def __init__(self, name: str, calls: list[str]) -> None:
        self._name, self._calls = name, calls

    def offload_states(self, include: Sequence[str] | None = None, level: int = 1) -> None:
        self._calls.append(f"offload {self._name} {level}")

    def reload_states(self, include: Sequence[str] | None = None, *, blocking: bool = True) -> Recorded:
        self._calls.append(f"reload {self._name}{'' if blocking else ' early'}")
        return self

    def wait(self) -> None:
        self._calls.append("wait")


def sharing(calls: list[str], *settings: str) -> GpuSharing:
    actor, engines = cast(Any, Recorded("actor", calls)), cast(Any, Recorded("engines", calls))
    config = load_config(None, ["trainer.colocate=true", *settings])
    return GpuSharing(config, Roles(actor=actor, rollout=engines, scoring=actor, weight_sync=actor))


@pytest.mark.parametrize("setting", ["distill.reference_kl_weight=0.1", "teacher.backend=local"])
def test_no_early_reload_if_another_model_shares_the_gpus(setting: str) -> None:
    """Fails if the student's states are on a GPU on which a local teacher or a reference needs their memory."""
    calls: list[str] = []
    with sharing(calls, setting).for_training(new_weights_follow=True):
        pass
    assert "reload actor early" not in calls


def test_no_offload_without_generation() -> None:
    """Fails if a replay, which generates nothing, pays for switches."""
    calls: list[str] = []
    m = StepMetrics(1)
    with sharing(calls).for_rollout(m, needed=False):
        pass
    assert calls == [] and "time/switch_s" not in m.times()


@pytest.mark.parametrize(("content", "level"), [("merged", 2), ("adapters", 1)])
def test_engines_keep_weights_that_are_not_sent_again(content: str, level: int) -> None:
    """Fails if engines discard the base weights although only adapters follow, or copy weights that are replaced."""
    calls: list[str] = []
    with sharing(calls, "actor.lora.rank=4", f"weight_sync.lora={content}").for_training(new_weights_follow=True):
        pass
    assert calls[0] == f"offload engines {level}"
