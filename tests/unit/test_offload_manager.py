"""States on the device for the time of a block, and the numbers of it."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gkd.actor import offload as held_states
from gkd.actor.offload import OffloadController
from gkd.memory.offload_manager import GIB, state_offload_manager


class Held:
    """A strategy that counts."""

    def __init__(self) -> None:
        self.calls: list[object] = []
        self.bytes = 0

    def offload_states(self, include: Sequence[str] | None = None, *, non_blocking: bool = False) -> None:
        self.calls.append("offload")
        self.bytes = 0

    def reload_states(self, include: Sequence[str] | None = None, *, non_blocking: bool = False) -> None:
        self.calls.append(include)
        self.bytes = 3 * GIB

    def allocated_bytes(self) -> int:
        return self.bytes


def test_it_reloads_runs_and_offloads_with_numbers() -> None:
    """Fails if a block runs without its states, they stay where nobody wants them, or its cost is not seen."""
    held, metrics = Held(), {"loss/total": 1.0}
    with state_offload_manager(held, metrics, "train", include=["params"]):
        assert held.calls == [["params"]]
        held.bytes += GIB
    assert held.calls == [["params"], "offload"]
    memory = {name: value for name, value in metrics.items() if name.startswith("memory/")}
    assert memory == {
        "memory/train/before_onload": 0.0,
        "memory/train/after_onload": 3.0,
        "memory/train/before_offload": 4.0,
        "memory/train/after_offload": 0.0,
    }
    assert {"time/train/onload", "time/train/execute", "time/train/offload"} <= metrics.keys()


def test_seconds_of_blocks_under_one_name_add_up() -> None:
    """Fails if of two calls in a step only the last one's time is seen."""
    held, metrics = Held(), {"time/sync/onload": 100.0}
    with state_offload_manager(held, metrics, "sync"):
        pass
    assert metrics["time/sync/onload"] >= 100.0


@pytest.mark.parametrize(("is_offload_states", "after"), [(True, ["offload"]), (False, [])])
def test_states_stay_where_the_call_wants_them(is_offload_states: bool, after: list[object]) -> None:
    """Fails if `is_offload_states` has no effect, or an error in the block leaves the states elsewhere."""
    for fails in (False, True):
        held, metrics = Held(), dict[str, float]()
        try:
            with state_offload_manager(held, metrics, "train", is_offload_states):
                if fails:
                    raise ArithmeticError
        except ArithmeticError:
            assert fails
        assert held.calls == [None, *after]
        assert ("time/train/offload" in metrics) == is_offload_states
        assert metrics["memory/train/after_offload"] == (0.0 if is_offload_states else 3.0)


class Full(Held):
    """Has no room for states, or no host memory to take them away."""

    def __init__(self, *fails: str) -> None:
        super().__init__()
        self.fails = fails

    def offload_states(self, include: Sequence[str] | None = None, *, non_blocking: bool = False) -> None:
        super().offload_states()
        if "offload" in self.fails:
            raise MemoryError("host")

    def reload_states(self, include: Sequence[str] | None = None, *, non_blocking: bool = False) -> None:
        super().reload_states(include)
        if "reload" in self.fails:
            raise MemoryError("device")


@pytest.mark.parametrize("is_offload_states", [True, False])
def test_a_reload_that_fails_leaves_states_where_they_were_wanted(is_offload_states: bool) -> None:
    """Fails if states that came back, in part or on this rank alone, stay on a device that was promised to others."""
    held = Full("reload")
    with pytest.raises(MemoryError, match="device"), state_offload_manager(held, {}, "train", is_offload_states):
        raise AssertionError("runs without its states")
    assert held.calls == ([None, "offload"] if is_offload_states else [None])


def test_the_first_error_is_the_one_that_is_raised() -> None:
    """Fails if an error of the block, or of the reload, is hidden by the offload after it."""
    for fails, first in ((["offload"], "block"), (["reload", "offload"], "device")):
        with pytest.raises((ArithmeticError, MemoryError), match=first), state_offload_manager(Full(*fails), {}, "x"):
            raise ArithmeticError("block")
    with pytest.raises(MemoryError, match="host"), state_offload_manager(Full("offload"), {}, "x"):
        pass


def test_what_stays_by_design_is_no_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if every run with a resident teacher is told of a leak, or a real one hides behind it."""
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    said: list[float] = []
    monkeypatch.setattr(held_states, "holders", lambda device: [])  # seconds, and not what is tested here
    monkeypatch.setattr(held_states.log, "warning", lambda text, gib, *_: said.append(gib))
    on_device = [0]
    student: Any = SimpleNamespace(states=SimpleNamespace(allocated=lambda: on_device[0]))
    held = OffloadController(student, torch.device("cpu"), automatic=True, timeout_s=1.0, staying=lambda: GIB)
    for n_bytes in (GIB, GIB + GIB // 2, GIB + GIB // 2, 2 * GIB):
        monkeypatch.setattr(held, "allocated_bytes", lambda n_bytes=n_bytes: n_bytes)
        held._name_who_stays()
    assert said == [0.5, 1.0]
    on_device[0] = 1
    monkeypatch.setattr(held, "allocated_bytes", lambda: 9 * GIB)
    held._name_who_stays()
    assert said == [0.5, 1.0], "states that are there are no leak"
