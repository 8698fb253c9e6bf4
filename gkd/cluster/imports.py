"""Import large libraries faster. Pure."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from gkd.cluster.garbage import never_collect_existing


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
        never_collect_existing()
        if was_on:
            gc.enable()
