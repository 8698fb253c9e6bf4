"""Measure the memory of this process and all processes that it starts."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import psutil

_EVERY_S = 2.0  # one sample reads /proc for milliseconds per process


def host_gib() -> float:
    """Return the memory of this process and its descendants.

    A page that several processes share counts once (proportional set size).
    """
    me, total = psutil.Process(), 0
    for process in [me, *me.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):  # It has ended since.
            total += process.memory_full_info().pss
    return total / 2**30


@contextmanager
def peak_memory(gib: Callable[[], float] = host_gib, every_s: float = _EVERY_S) -> Iterator[list[float]]:
    """Sample `gib` in a thread during the block; the list has one number, the largest so far."""
    peak, ended = [0.0], threading.Event()

    def sample() -> None:
        while not ended.wait(every_s):
            peak[0] = max(peak[0], gib())

    thread = threading.Thread(target=sample, name="memory", daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        ended.set()
        thread.join()
