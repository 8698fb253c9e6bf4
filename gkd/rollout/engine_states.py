"""Offload and reload the states of one rollout engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from gkd.errors import ClusterError
from gkd.memory.offload_manager import GIB
from gkd.rollout.sleep_state import KV_CACHE, WEIGHTS

# Names of the states, as in the actor's `offload_states` -> tags of vLLM's sleep mode.
STATES = {"params": WEIGHTS, "kv_cache": KV_CACHE}


class SleepingEngine(Protocol):
    """The part of `gkd.rollout.engine.RolloutEngine` that this module uses."""

    def sleep(self, level: int = 1, tags: Sequence[str] | None = None) -> None: ...
    def wake_up(self, tags: Sequence[str] | None = None) -> None: ...
    def memory_bytes(self) -> dict[str, int]: ...
    def process_memory(self) -> dict[str, int]: ...


class EngineStates:
    """Move the states of one engine and record the memory it holds. Used by one thread at a time.

    Args:
        diagnosed: phase -> context manager that explains out-of-memory errors of this phase.
        timeline: record memory at the end of each phase (memory.timeline).
    """

    def __init__(
        self, engine: SleepingEngine, diagnosed: Callable[[str], AbstractContextManager[None]], *, timeline: bool
    ) -> None:
        self._engine, self._diagnosed, self._timeline = engine, diagnosed, timeline
        self._peaks: dict[str, float] = {}  # metric name -> peak since the last `pop_peaks`

    def offload(self, tags: Sequence[str], level: int) -> None:
        """Release GPU memory; see `RolloutWorker.offload_states`."""
        with self._diagnosed("offloading states"):
            self._engine.sleep(level, tags)
        self.record("offloading_states")

    def reload(self, tags: Sequence[str] | None) -> None:
        """Allocate the GPU memory of these tags (None means all) again; see `RolloutWorker.reload_states`."""
        with self._diagnosed("reloading states"):
            self._engine.wake_up(tags)

    def state_bytes(self) -> dict[str, int]:
        """Return state -> bytes on the engine's GPUs."""
        held = self._engine.memory_bytes()
        return {state: held[tag] for state, tag in STATES.items()}

    def record(self, phase: str) -> None:
        """Record the memory held at the end of a phase; no-op unless memory.timeline is on."""
        if not self._timeline:
            return
        for name, n_bytes in (self.state_bytes() | self._engine.process_memory()).items():
            metric = f"memory/{phase}/rollout_{name}_gib"
            self._peaks[metric] = max(n_bytes / GIB, self._peaks.get(metric, 0.0))

    def pop_peaks(self) -> dict[str, float]:
        """Return and reset metric name -> peak since the last call."""
        peaks, self._peaks = self._peaks, {}
        return peaks


def tags_of(include: Sequence[str] | None) -> list[str]:
    """Return the tags of these states, None = all. Raises ClusterError: a rollout engine has no such state."""
    states = list(STATES if include is None else include)
    unknown = [state for state in states if state not in STATES]
    if unknown:
        raise ClusterError(f"a rollout engine has no state {unknown[0]!r}. Fix: include some of {', '.join(STATES)}")
    return [STATES[state] for state in states]
