"""Imports without garbage collection."""

from __future__ import annotations

import gc

import pytest

from gkd.cluster.imports import quick_imports


def test_the_collector_rests_and_then_leaves_the_imported_alone() -> None:
    """Fails if an engine's start pays for the collector again, or a process stays without one and leaks."""
    assert gc.isenabled()
    was = gc.get_freeze_count()
    with quick_imports():
        assert not gc.isenabled()
        kept = [[number] for number in range(10_000)]
    assert gc.isenabled() and gc.get_freeze_count() >= was + len(kept)


def test_a_failed_import_turns_it_on_again() -> None:
    """Fails if the process that reports a missing library never collects again."""
    with pytest.raises(ModuleNotFoundError), quick_imports():
        import gkd.no_such_module  # type: ignore[import-not-found]  # noqa: F401
    assert gc.isenabled()


def test_whoever_turned_it_off_keeps_it_off() -> None:
    """Fails if a process of somebody who collects by hand is collected beside them."""
    gc.disable()
    try:
        with quick_imports():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
