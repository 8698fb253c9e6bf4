"""What an engine remembers of its own memory: which parts are asleep, and whether its weights are any."""

from __future__ import annotations

from typing import Any

import pytest

from gkd.errors import ClusterError
from gkd.rollout.residency import KV_CACHE, PARTS, WEIGHTS, Residency, check_level


class Workers:
    """Two of them, which do what they are told, or fail."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.error: Exception | None = None

    def __call__(self, method: str, *args: Any) -> list[Any]:
        self.calls.append((method, *args))
        if self.error is not None:
            raise self.error
        return [{WEIGHTS: 3, KV_CACHE: 4}, {WEIGHTS: 30, KV_CACHE: 40}]


def test_only_what_is_awake_is_moved_and_only_what_is_asleep_comes_back() -> None:
    """Fails if a repeated call frees or fills memory twice, or the workers are told of the wrong remainder."""
    workers = Workers()
    residency = Residency(workers, can_sleep=True)
    residency.wake_up(PARTS)
    assert residency.to_sleep(PARTS) == list(PARTS)
    residency.sleep([KV_CACHE], 1)
    assert residency.to_sleep(PARTS) == [WEIGHTS]
    residency.sleep([WEIGHTS], 1)
    assert residency.to_sleep(PARTS) == []
    residency.wake_up([WEIGHTS, WEIGHTS])
    residency.wake_up([WEIGHTS])
    residency.wake_up(PARTS)
    assert workers.calls == [
        ("gkd_sleep", [KV_CACHE], [WEIGHTS], 1),
        ("gkd_sleep", [WEIGHTS], [], 1),
        ("gkd_wake", [WEIGHTS], False),
        ("gkd_wake", [KV_CACHE], False),
    ]
    assert residency.memory_bytes() == {WEIGHTS: 33, KV_CACHE: 44}


def test_dropped_weights_are_none_until_some_have_come() -> None:
    """Fails if garbage counts as weights after a partial wake-up or another sleep, or if good weights do not."""
    workers = Workers()
    residency = Residency(workers, can_sleep=True)
    residency.sleep([KV_CACHE], 2)
    residency.require_content("write")  # the weights are still there
    residency.sleep([WEIGHTS], 2)
    residency.wake_up([WEIGHTS])
    residency.sleep([WEIGHTS], 1)  # keeps a copy of garbage
    residency.wake_up(PARTS)
    assert [call[-1] for call in workers.calls if call[0] == "gkd_wake"] == [True, True]
    with pytest.raises(ClusterError, match=r"cannot write: .*receive a version of the weights"):
        residency.require_content("write")
    residency.written()
    residency.require_content("write")
    residency.sleep([WEIGHTS], 1)
    residency.wake_up(PARTS)
    residency.require_content("write")
    assert workers.calls[-1] == ("gkd_wake", [WEIGHTS], False)


def test_an_engine_whose_move_failed_is_asleep() -> None:
    """Fails if an engine is used of which nobody knows what is left, or cannot be brought back after all."""
    workers = Workers()
    residency = Residency(workers, can_sleep=True)
    workers.error = RuntimeError("no memory")
    with pytest.raises(RuntimeError):
        residency.sleep(PARTS, 1)
    with pytest.raises(RuntimeError):
        residency.wake_up(PARTS)
    with pytest.raises(ClusterError, match=r"write: weights and kv_cache asleep. Fix: call wake_up\(\['weights'"):
        residency.require(PARTS, "write")
    workers.error = None
    residency.wake_up(PARTS)
    residency.require(PARTS, "write")
    assert workers.calls[-1] == ("gkd_wake", list(PARTS), False)


def test_what_cannot_be() -> None:
    """Fails if a misspelt part or an impossible level passes for "nothing to do"."""
    residency = Residency(Workers(), can_sleep=True)
    for call in (residency.to_sleep, residency.wake_up):
        with pytest.raises(ClusterError, match="no part 'kv'. Fix: name some of weights, kv_cache"):
            call(["kv"])
    for level in (0, 3, "1"):
        with pytest.raises(ClusterError, match="sleep level"):
            check_level(level)  # type: ignore[arg-type]
    stays = Residency(Workers(), can_sleep=False)
    with pytest.raises(ClusterError, match="trainer.colocate: true"):
        stays.to_sleep(PARTS)
    stays.wake_up(PARTS)
