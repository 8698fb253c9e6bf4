"""What ranks do together when states move and one of them fails. Real gloo ranks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from gkd.actor.offload import OffloadController
from gkd.errors import DataError
from gkd.memory.oom import diagnosed
from gkd.memory.states import OPTIMIZER, PARAMS, States
from tests.dist.helpers import caught, run_gloo

pytestmark = pytest.mark.dist

CPU = torch.device("cpu")
TO_HOST = {"is_offload_states": True}


def _run(rank: int, world_size: int, root: Path) -> dict[str, Any]:
    """Runs in a rank."""
    result = _together(rank, world_size, root)
    result["explained"] = _explained(rank, root / "reports")
    result["apart"] = _apart(rank)
    result["given_back"] = _given_back(rank)
    return result


@contextmanager
def _scarce(here: bool) -> Iterator[None]:
    """The device of this rank has no memory for what comes back."""
    real = torch.UntypedStorage.resize_

    def scarce(storage: torch.UntypedStorage, n_bytes: int) -> object:
        return real(storage, 2**60 if here and n_bytes else n_bytes)

    torch.UntypedStorage.resize_ = scarce  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = real  # type: ignore[method-assign]


def _explained(rank: int, reports: Path) -> dict[str, Any]:
    """Memory that runs out on rank 0 while states move, as each rank has it."""

    def explains(phase: str) -> AbstractContextManager[None]:
        who = f"actor rank {rank}"
        return diagnosed(reports, device=CPU, who=who, phase=phase, advice=lambda shortage: ["a.key: lower it"])

    states = States(CPU, lambda: found)
    found = {PARAMS: [torch.ones(1000)]}
    student = cast(Any, SimpleNamespace(states=states))
    held = OffloadController(student, CPU, automatic=True, timeout_s=60, diagnosed=explains)
    held.offload_states()

    def call(meta: dict[str, Any] | None = None) -> None:
        with held.needed("call", meta=meta):
            raise AssertionError("runs without its states")

    result: dict[str, Any] = {}
    with _scarce(rank == 0):
        result["by_hand"] = caught(held.reload_states)
        result["written"] = len(list(reports.glob("*.json")))
        held.offload_states()
        result["in_a_call"] = caught(call)
        result["after_it"] = states.allocated()
        result["kept"] = [*caught(lambda: call({"is_offload_states": False})), states.allocated()]
    return result


def _apart(rank: int) -> list[Any]:
    """A call that rank 0 alone is in moves its states, and then all ranks need theirs."""
    found = {PARAMS: [torch.ones(1000)], OPTIMIZER: [torch.ones(10)]}
    states = States(CPU, lambda: found)
    held = OffloadController(cast(Any, SimpleNamespace(states=states)), CPU, automatic=False, timeout_s=60)
    result: list[Any] = []
    if rank == 0:
        with held.needed("sync", [PARAMS], TO_HOST, alone=True):
            pass
        result.append(states.allocated())
    for include, meta in (([PARAMS], None), (None, None), (None, TO_HOST), (None, None)):
        with held.needed("train", include, meta):
            result.append([float(tensor.sum()) for kind in include or found for tensor in found[kind]])
    return result


def _given_back(rank: int) -> int:
    """How often torch's cache is emptied on a rank of a GPU, when a reload fails on rank 0."""
    states = States(CPU, lambda: found)
    found = {PARAMS: [torch.ones(1000)]}
    student = cast(Any, SimpleNamespace(states=states))
    held = OffloadController(student, torch.device("cuda", 0), automatic=True, timeout_s=60)
    states.offload()
    with _scarce(rank == 0), pytest.MonkeyPatch.context() as patch:
        calls: list[int] = []
        patch.setattr(torch.cuda, "empty_cache", lambda: calls.append(1))
        assert _error_of(held.reload_states) is not None
    return len(calls)


def _together(rank: int, world_size: int, root: Path) -> dict[str, Any]:
    """Runs in a rank: errors of all ranks, and a move that fails on one."""
    del world_size
    found = {PARAMS: [torch.ones(1000)]}
    states = States(CPU, lambda: found)
    held = OffloadController(cast(Any, SimpleNamespace(states=states)), CPU, automatic=True, timeout_s=60)
    result: dict[str, Any] = {}

    def block() -> None:
        with held.needed("call"):
            raise DataError("bad batch")

    def breaks() -> None:
        with held.needed("call"):
            if rank == 0:
                raise torch.OutOfMemoryError("no memory")
            # This rank is in a collective of the call, which rank 0 has left and will not come back to.
            deadline = time.monotonic() + 40.0
            while not (root / "rank 0 is out").exists():
                assert time.monotonic() < deadline, "rank 0 waits for this rank"
                time.sleep(0.05)
            raise RuntimeError("the other one has gone")

    result["alone"] = [type(_error_of(breaks)).__name__, states.allocated()]
    (root / f"rank {rank} is out").touch()
    result["everybodys"] = [caught(block), states.allocated()]
    with _scarce(rank == 0):
        result["one_fails"] = str(_error_of(held.reload_states))
    held.reload_states()
    result["again"] = [states.allocated(), float(found[PARAMS][0].sum())]
    moves = held.offload_states(non_blocking=True)
    moves.wait()
    moves.wait()
    result["not_blocking"] = states.allocated()
    return result


def _error_of(work: Any) -> Exception | None:
    try:
        work()
    except Exception as error:
        return error
    return None


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_gloo(_run, 2, tmp_path_factory.mktemp("meeting"), timeout_s=120.0)


def test_an_error_of_one_rank_comes_out_there(ranks: list[dict[str, Any]]) -> None:
    """Fails if a rank that runs out of memory waits for the others, who wait for it, and nobody hears of its error; or
    its states do not end where the settings say.
    """
    assert [rank["alone"] for rank in ranks] == [["OutOfMemoryError", 0], ["RuntimeError", 0]]


def test_all_ranks_know_when_one_cannot_move(ranks: list[dict[str, Any]]) -> None:
    """Fails if a rank that is short of memory leaves the others waiting, or their next meeting is with its last one."""
    for rank in ranks:
        assert "bad batch" in str(rank["everybodys"][0]) and rank["everybodys"][1] == 0
        assert rank["again"] == [4000, 1000.0] and rank["not_blocking"] == 0
    assert "allocate" in ranks[0]["one_fails"]
    assert "the states of actor rank 0 could not be moved: RuntimeError" in ranks[1]["one_fails"]


def test_a_shortage_during_a_move_is_explained_before_the_others_hear_of_it(ranks: list[dict[str, Any]]) -> None:
    """Fails if the driver, which ends the run at the first error that it hears, may hear of one that explains nothing,
    or before the report is written.
    """
    for rank in ranks:
        explained = rank["explained"]
        for kind, text in (explained["by_hand"], explained["in_a_call"], explained["kept"][:2]):
            assert kind == "OutOfMemory" and "actor rank 0 ran out of memory of the host (reloading states)" in text
            assert "a.key: lower it" in text and "saved: " in text
        assert explained["written"] == 1


def test_states_go_where_the_settings_say_if_another_rank_cannot_reload(ranks: list[dict[str, Any]]) -> None:
    """Fails if the ranks that could are left with their states on a device that others are to have."""
    assert [rank["explained"]["after_it"] for rank in ranks] == [0, 0]
    assert [rank["given_back"] for rank in ranks] == [1, 1], "what a part of the states had taken"
    assert [rank["explained"]["kept"][2] for rank in ranks] == [0, 4000], "this call was told to leave them there"


def test_a_call_without_the_others_may_move_states(ranks: list[dict[str, Any]]) -> None:
    """Fails if the next call of all ranks computes on storages that a call of some has emptied, or waits for ranks that
    know nothing of it.
    """
    needed = [[1000.0], [1000.0, 10.0], [1000.0, 10.0], [1000.0, 10.0]]
    assert [rank["apart"] for rank in ranks] == [[0, *needed], needed]
