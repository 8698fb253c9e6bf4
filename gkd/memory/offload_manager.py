"""Keep states on the device during a block, and measure what the moves cost."""

from __future__ import annotations

import time
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Protocol

from gkd.log import get_logger

log = get_logger("memory")

GIB = 1 << 30


class Strategy(Protocol):
    """An owner of states that move: `gkd.memory.states.States`, a rank's `OffloadController`, a pool."""

    def offload_states(self, include: Sequence[str] | None = None) -> object:
        """Move states to host memory; see `States.offload_states`."""

    def reload_states(self, include: Sequence[str] | None = None) -> object:
        """Move states back to the device."""

    def allocated_bytes(self) -> int:
        """Return the bytes on the device; of a pool, those of the process with most."""


@contextmanager
def state_offload_manager(
    strategy: Strategy,
    metrics: MutableMapping[str, float],
    metric_infix: str,
    is_offload_states: bool = True,
    *,
    include: Sequence[str] | None = None,
    offload: Sequence[str] | None = None,
) -> Iterator[None]:
    """Reload the states, run the block, and offload them again, also after an error in the block or in the reload.

    Writes into `metrics`:
        `time/<infix>/onload`, `execute`, `offload`, in seconds; repeated blocks of one infix add up.
        `memory/<infix>/before_onload`, `after_onload`, `before_offload`, `after_offload`, in GiB allocated; repeated
        blocks overwrite them.

    Args:
        is_offload_states: False: the states stay on the device after the block.
        include: the kinds that the block needs, of `gkd.memory.states.KINDS` or, of engines, "params" and "kv_cache";
            None: all.
        offload: the kinds that are offloaded afterwards; None, and after an error: all.
    """

    def add_time(what: str, began: float) -> None:
        name = f"time/{metric_infix}/{what}"
        metrics[name] = metrics.get(name, 0.0) + time.perf_counter() - began

    def note(what: str) -> None:
        metrics[f"memory/{metric_infix}/{what}"] = strategy.allocated_bytes() / GIB

    def leave(kinds: Sequence[str] | None) -> None:
        note("before_offload")
        if is_offload_states:
            began = time.perf_counter()
            strategy.offload_states(kinds)
            add_time("offload", began)
        note("after_offload")

    note("before_onload")
    try:
        began = time.perf_counter()
        strategy.reload_states(include)
        add_time("onload", began)
        note("after_onload")
        began = time.perf_counter()
        try:
            yield
        finally:
            add_time("execute", began)
    except BaseException as error:
        try:
            leave(None)
        except Exception as later:  # logged; the user needs the first error
            log.error(
                "after %s the states could not be moved: %s: %s", type(error).__name__, type(later).__name__, later
            )
        raise
    leave(offload)
