"""Garbage collection in the driver, and during imports."""

from __future__ import annotations

import gc
import weakref

import pytest

from gkd.cluster.garbage import collect_garbage_rarely, quick_imports


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


def test_imported_objects_are_not_collected() -> None:
    """Fails if garbage collection runs during imports, or stays disabled afterwards, even after a failed one."""
    assert gc.isenabled()
    was = gc.get_freeze_count()
    with quick_imports():
        assert not gc.isenabled()
        kept = [[number] for number in range(10_000)]
    assert gc.isenabled() and gc.get_freeze_count() >= was + len(kept)
    with pytest.raises(ModuleNotFoundError), quick_imports():
        import gkd.no_such_module  # type: ignore[import-not-found]  # noqa: F401
    assert gc.isenabled()
    gc.disable()
    try:
        with quick_imports():
            pass
        assert not gc.isenabled(), "a process that had disabled it keeps it disabled"
    finally:
        gc.enable()
