"""What ranks do together when states move and one of them fails. Real gloo ranks."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from gkd.actor.held_states import HeldStates
from gkd.errors import DataError
from gkd.memory.states import PARAMS, States
from tests.dist.helpers import caught, run_gloo

pytestmark = pytest.mark.dist

CPU = torch.device("cpu")


def _together(rank: int, world_size: int, root: Path) -> dict[str, Any]:
    """Runs in a rank: errors of all ranks, and a move that fails on one."""
    del world_size
    found = {PARAMS: [torch.ones(1000)]}
    states = States(CPU, lambda: found)
    held = HeldStates(cast(Any, SimpleNamespace(states=states)), CPU, automatic=True, timeout_s=60)
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
    real, fails = torch.UntypedStorage.resize_, [rank == 0]

    def scarce(storage: torch.UntypedStorage, n_bytes: int) -> object:
        return real(storage, 2**60 if fails[0] and n_bytes else n_bytes)

    torch.UntypedStorage.resize_ = scarce  # type: ignore[method-assign,assignment]
    result["one_fails"] = str(_error_of(held.reload_states))
    fails[0] = False
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
    return run_gloo(_together, 2, tmp_path_factory.mktemp("meeting"), timeout_s=120.0)


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
