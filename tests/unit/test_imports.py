"""Imports without garbage collection."""

from __future__ import annotations

import gc

import pytest

from gkd.cluster.imports import quick_imports


def test_imported_objects_are_not_collected() -> None:
    """Fails if garbage collection runs during imports, or stays disabled afterwards."""
    assert gc.isenabled()
    was = gc.get_freeze_count()
    with quick_imports():
        assert not gc.isenabled()
        kept = [[number] for number in range(10_000)]
    assert gc.isenabled() and gc.get_freeze_count() >= was + len(kept)


def test_failed_import_enables_collection_again() -> None:
    """Fails if garbage collection stays disabled after an import error."""
    with pytest.raises(ModuleNotFoundError), quick_imports():
        import gkd.no_such_module  # type: ignore[import-not-found]  # noqa: F401
    assert gc.isenabled()


def test_disabled_collection_stays_disabled() -> None:
    """Fails if garbage collection is enabled in a process that had disabled it."""
    gc.disable()
    try:
        with quick_imports():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
