"""Garbage collection in the driver."""

from __future__ import annotations

import gc
import weakref

from gkd.cluster.garbage import collect_garbage_rarely


class Node:
    def __init__(self) -> None:
        self.me = self


def test_the_objects_of_a_large_step_cause_few_collections_and_cycles_are_still_freed() -> None:
    """Fails if the collector takes a fifth of the driver's time again, or never frees a cycle."""
    before, collections, n_frozen = gc.get_threshold(), list[int](), gc.get_freeze_count()

    def count(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            collections.append(info["generation"])

    gc.callbacks.append(count)
    try:
        collect_garbage_rarely()
        cycle = weakref.ref(Node())
        kept = [[i] for i in range(44_000)]
    finally:
        gc.callbacks.remove(count)
        gc.set_threshold(*before)
        if not n_frozen:
            gc.unfreeze()
    assert len(kept) == 44_000 and 1 <= len(collections) <= 3 and cycle() is None
