"""Which parts of a rollout engine are on its device: it gives them away between two uses, and takes them back.

    generate -> sleep -> somebody else has the device -> wake_up(weights) -> receive -> wake_up(kv_cache) -> generate

What an engine that lacks something must not do is refused here; `gkd.rollout.sleeper` moves the memory. No vLLM here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from gkd.errors import ClusterError

WEIGHTS, KV_CACHE = "weights", "kv_cache"
PARTS = (WEIGHTS, KV_CACHE)


class Residency:
    """The state of one engine's parts, the same on all its workers.

    Args:
        call: calls a method of all workers by name, with positional arguments; returns their answers.
        can_sleep: the engine was built so that it can.
    """

    def __init__(self, call: Callable[..., list[Any]], *, can_sleep: bool) -> None:
        self._call, self._can_sleep = call, can_sleep
        self._asleep: set[str] = set()
        self._lost = False  # the weights were dropped, and none have come since

    def to_sleep(self, parts: Iterable[str]) -> list[str]:
        """Those of some parts that are awake, that is, what `sleep` would move.

        Raises:
            ClusterError: no such part, or the engine cannot sleep.
        """
        chosen = _chosen(parts)
        if not self._can_sleep:
            raise ClusterError(
                "this rollout engine was built to keep its memory. Fix: trainer.colocate: true (can_sleep=True)"
            )
        return [part for part in chosen if part not in self._asleep]

    def sleep(self, parts: Sequence[str], level: int) -> None:
        """Move parts that are awake. After an error they count as asleep, and another `wake_up` may bring them back."""
        staying = [part for part in PARTS if part not in self._asleep and part not in parts]
        self._asleep |= set(parts)
        self._lost |= level == 2 and WEIGHTS in parts
        self._call("gkd_sleep", list(parts), staying, level)

    def wake_up(self, parts: Iterable[str]) -> None:
        """Bring back those that are asleep. After an error all of them still count as asleep.

        Raises ClusterError: no such part.
        """
        chosen = [part for part in _chosen(parts) if part in self._asleep]
        if chosen:
            self._call("gkd_wake", chosen, WEIGHTS in chosen and self._lost)
            self._asleep -= set(chosen)

    def require(self, parts: Iterable[str], what: str) -> None:
        """Raises ClusterError: one of the parts is asleep, so the engine cannot do `what`."""
        missing = [part for part in parts if part in self._asleep]
        if missing:
            raise ClusterError(
                f"the rollout engine cannot {what}: {' and '.join(missing)} asleep. Fix: call wake_up({missing}) first"
            )

    def require_content(self, what: str) -> None:
        """Raises ClusterError: the weights are not the student's any more."""
        if self._lost:
            raise ClusterError(
                f"the rollout engine cannot {what}: sleep(level=2) dropped its weights, and none have come since. "
                "Fix: receive a version of the weights first, or sleep(level=1), which keeps them"
            )

    def written(self) -> None:
        """A whole version of the weights has come."""
        self._lost = False

    def memory_bytes(self) -> dict[str, int]:
        """Bytes that each part holds on the devices of all workers together."""
        answers = self._call("gkd_memory")
        return {part: sum(answer[part] for answer in answers) for part in PARTS}


def check_level(level: int) -> None:
    """Raises ClusterError: there is no such level of sleep."""
    if level not in (1, 2):
        raise ClusterError(f"sleep level {level!r}: there are 1 (the host keeps the weights) and 2 (nobody does)")


def _chosen(parts: Iterable[str]) -> list[str]:
    wanted = list(parts)
    unknown = [part for part in wanted if part not in PARTS]
    if unknown:
        raise ClusterError(f"a rollout engine has no part {unknown[0]!r}. Fix: name some of {', '.join(PARTS)}")
    return [part for part in PARTS if part in wanted]
