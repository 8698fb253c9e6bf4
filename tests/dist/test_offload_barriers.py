"""Barriers of the ranks when states move and a rank fails. Real ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from gkd.actor.offload import OffloadController
from gkd.errors import DataError
from gkd.memory.oom import diagnosed
from gkd.memory.states import OPTIMIZER, PARAMS, States
from gkd.spans import Phase
from tests.device import on_cuda, rank_device
from tests.dist.helpers import caught, run_ranks
from tests.processes import wait_until

pytestmark = pytest.mark.dist

DEVICE = rank_device()


def _run(rank: int, world_size: int, root: Path) -> dict[str, Any]:
    """Runs in a rank."""
    result = {"gloo_groups": _groups_of_barriers(), **_errors(rank, root)}
    result["diagnosed"] = _diagnosed(rank, root / "reports")
    result["local_call"] = _local_call(rank)
    result["n_cache_releases"] = _n_cache_releases(rank)
    return result


def _groups_of_barriers() -> list[int]:
    """Return the groups that exist before any call, after a call that moves nothing, and after two that do."""
    made: list[Any] = []
    states = States(DEVICE, lambda: found)
    found = {PARAMS: [torch.ones(10, device=DEVICE)]}
    with pytest.MonkeyPatch.context() as patch:
        new_group = dist.new_group
        patch.setattr(dist, "new_group", lambda **options: made.append(options) or new_group(**options))
        controller = OffloadController(cast(Any, SimpleNamespace(states=states)), DEVICE, automatic=False, timeout_s=60)
        counts = [len(made)]
        for to_host in (None, True, True):
            with controller.states_on_device("train", None, to_host):
                counts.append(len(made))
    return counts


@contextmanager
def _scarce(here: bool) -> Iterator[None]:
    """Let every reload fail on this rank, as if its device were full."""
    real = torch.UntypedStorage.resize_

    def scarce(storage: torch.UntypedStorage, n_bytes: int) -> object:
        return real(storage, 2**60 if here and n_bytes else n_bytes)

    torch.UntypedStorage.resize_ = scarce  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = real  # type: ignore[method-assign]


def _diagnosed(rank: int, reports: Path) -> dict[str, Any]:
    """Return each rank's error when rank 0 runs out of memory during a reload, and where the states are then."""

    def diagnose(phase: Phase) -> AbstractContextManager[None]:
        who = f"actor rank {rank}"
        return diagnosed(reports, device=DEVICE, who=who, phase=phase, advice=lambda on_cuda: ["a.key: lower it"])

    states = States(DEVICE, lambda: found)
    found = {PARAMS: [torch.ones(1000, device=DEVICE)]}
    student = cast(Any, SimpleNamespace(states=states))
    controller = OffloadController(student, DEVICE, automatic=True, timeout_s=60, diagnosed=diagnose)
    controller.offload_states()

    def call(to_host: bool | None = None) -> None:
        with controller.states_on_device("call", None, to_host):
            raise AssertionError("the block runs without its states")

    result: dict[str, Any] = {}
    with _scarce(rank == 0):
        result["explicit"] = caught(controller.reload_states)
        controller.offload_states()
        result["in_call"] = caught(call)
        result["after_call"] = states.allocated_bytes()
        result["kept"] = [*caught(lambda: call(False)), states.allocated_bytes()]
    return result


def _local_call(rank: int) -> list[Any]:
    """Offload rank 0's states in a call of rank 0 alone, then make calls of all ranks."""
    found = {PARAMS: [torch.ones(1000, device=DEVICE)], OPTIMIZER: [torch.ones(10, device=DEVICE)]}
    states = States(DEVICE, lambda: found)
    controller = OffloadController(cast(Any, SimpleNamespace(states=states)), DEVICE, automatic=False, timeout_s=60)
    result: list[Any] = []
    if rank == 0:
        with controller.states_on_device("sync", [PARAMS], True, alone=True):
            pass
        result.append(states.allocated_bytes())
    for include, to_host in (([PARAMS], None), (None, None), (None, True), (None, None)):
        with controller.states_on_device("train", include, to_host):
            result.append([float(tensor.sum()) for kind in include or found for tensor in found[kind]])
    return result


def _n_cache_releases(rank: int) -> int:
    """Return how often a GPU rank empties torch's cache when a reload fails on rank 0."""
    states = States(DEVICE, lambda: found)
    found = {PARAMS: [torch.ones(1000, device=DEVICE)]}
    student = cast(Any, SimpleNamespace(states=states))
    controller = OffloadController(student, torch.device("cuda", 0), automatic=True, timeout_s=60)
    states.offload_states()
    with _scarce(rank == 0), pytest.MonkeyPatch.context() as patch:
        calls: list[int] = []
        patch.setattr(torch.cuda, "empty_cache", lambda: calls.append(1))
        assert _error_of(controller.reload_states) is not None
    return len(calls)


def _errors(rank: int, root: Path) -> dict[str, Any]:
    """Return the errors of a call that fails on all ranks or on one, and of a move that fails on one."""
    found = {PARAMS: [torch.ones(1000, device=DEVICE)]}
    states = States(DEVICE, lambda: found)
    controller = OffloadController(cast(Any, SimpleNamespace(states=states)), DEVICE, automatic=True, timeout_s=60)
    result: dict[str, Any] = {}

    def block() -> None:
        with controller.states_on_device("call"):
            raise DataError("bad batch")

    def breaks() -> None:
        with controller.states_on_device("call"):
            if rank == 0:
                raise torch.OutOfMemoryError("no memory")
            # This rank is blocked in a collective of the call, which rank 0 has left.
            wait_until((root / "rank 0 is out").exists, 40.0, "rank 0 waits for this rank in a barrier")
            raise RuntimeError("connection lost")

    result["alone"] = [type(_error_of(breaks)).__name__, states.allocated_bytes()]
    (root / f"rank {rank} is out").touch()
    result["on_all_ranks"] = [caught(block), states.allocated_bytes()]
    with _scarce(rank == 0):
        result["failed_move"] = str(_error_of(controller.reload_states))
    controller.reload_states()
    result["next_move"] = [states.allocated_bytes(), float(found[PARAMS][0].sum())]
    return result


def _error_of(work: Any) -> Exception | None:
    try:
        work()
    except Exception as error:
        return error
    return None


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(_run, 2, tmp_path_factory.mktemp("barriers"), timeout_s=120.0)


def test_a_rank_that_fails_alone_skips_the_barriers(ranks: list[dict[str, Any]]) -> None:
    """Fails if a rank that runs out of memory deadlocks with the others, or its states are not where the settings
    specify.
    """
    assert [rank["alone"] for rank in ranks] == [["OutOfMemoryError", 0], ["RuntimeError", 0]]


def test_a_failed_move_fails_on_all_ranks(ranks: list[dict[str, Any]]) -> None:
    """Fails if a rank without memory leaves the others waiting, or the next barrier is paired with a past one."""
    for rank in ranks:
        assert "bad batch" in str(rank["on_all_ranks"][0]) and rank["on_all_ranks"][1] == 0
        assert rank["next_move"] == [4000, 1000.0]
    assert "allocate" in ranks[0]["failed_move"]
    kind = "OutOfMemoryError" if on_cuda() else "RuntimeError"
    assert "actor rank 0" in ranks[1]["failed_move"] and kind in ranks[1]["failed_move"]


def test_an_out_of_memory_error_is_diagnosed_before_the_others_learn_of_it(ranks: list[dict[str, Any]]) -> None:
    """Fails if the driver, which ends the run at the first error, can receive one without a diagnosis."""
    for rank in ranks:
        result = rank["diagnosed"]
        for kind, text in (result["explicit"], result["in_call"], result["kept"][:2]):
            assert kind == "OutOfMemory" and "actor rank 0" in text and "reloading states" in text
            assert "a.key: lower it" in text


def test_states_are_offloaded_if_another_rank_cannot_reload(ranks: list[dict[str, Any]]) -> None:
    """Fails if the ranks that could reload keep their states on a device that other processes need."""
    assert [rank["diagnosed"]["after_call"] for rank in ranks] == [0, 0]
    assert [rank["n_cache_releases"] for rank in ranks] == [1, 1], "memory of the states that had been reloaded"
    assert [rank["diagnosed"]["kept"][2] for rank in ranks] == [0, 4000], "this call leaves them on the device"


def test_a_call_of_one_rank_may_move_its_states(ranks: list[dict[str, Any]]) -> None:
    """Fails if the next call of all ranks computes on storages that a call of one rank has emptied, or waits in a
    barrier that the other ranks skip.
    """
    sums = [[1000.0], [1000.0, 10.0], [1000.0, 10.0], [1000.0, 10.0]]
    assert [rank["local_call"] for rank in ranks] == [[0, *sums], sums]


def test_the_group_of_the_barriers_is_made_for_the_first_move(ranks: list[dict[str, Any]]) -> None:
    """Fails if a run that never moves states needs gloo, or each move makes another group."""
    assert [rank["gloo_groups"] for rank in ranks] == [[0, 0, 1, 1]] * 2
