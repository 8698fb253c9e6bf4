"""Run Python's cyclic garbage collector less often, and not during the import of large libraries. Pure."""

from __future__ import annotations

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager

# Objects that are made and not freed between two collections; collections between two of the next generation. The
# default is 700, 10, 10.
_THRESHOLDS = 20_000, 10, 10


def collect_garbage_rarely() -> None:
    """Collect after 20,000 new objects instead of 700, and never among the objects that exist now.

    Call it before the loop. A step of 65,536 sequences makes about 44,000 objects that live for some steps; the
    collector traversed them, and everything that was imported, without finding garbage: a fifth of the driver's CPU
    time.
    """
    _never_collect_existing()
    gc.set_threshold(*_THRESHOLDS)


def _never_collect_existing() -> None:
    """Exclude all objects that exist now from later collections."""
    gc.freeze()
    atexit.register(gc.unfreeze)  # otherwise C++ libraries that count their live objects at exit report leaks


@contextmanager
def quick_imports() -> Iterator[None]:
    """Disable garbage collection during imports, and exclude all objects that exist at the end from later collections.

    The import of vLLM creates more than a million objects that live as long as the process. The collector traverses
    them repeatedly without effect, for seconds. Use it only for imports: cyclic garbage that exists at the end is never
    freed.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        _never_collect_existing()
        if was_on:
            gc.enable()
