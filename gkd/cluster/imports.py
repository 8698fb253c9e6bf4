"""Import large libraries faster. Pure."""

from __future__ import annotations

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quick_imports() -> Iterator[None]:
    """Inside of it there is no garbage collection; what is alive at its end is never looked at by a later one.

    To import vLLM makes more than a million objects, which stay as long as the process does. The collector walks all of
    them again and again as they become more, in vain, for seconds. For imports alone: cyclic garbage
    that is there at the end is never freed.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        atexit.register(gc.unfreeze)  # or libraries in C++ that count what is left of them find all of it
        if was_on:
            gc.enable()
