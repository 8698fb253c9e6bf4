"""Measure the memory of this process and all processes that it starts."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil

_EVERY_S = 2.0  # one sample reads /proc for milliseconds per process


@contextmanager
def peak_memory() -> Iterator[list[float]]:
    """Sample the memory in a thread during the block; the list has one number, the largest sum so far in GiB.

    A page that several processes share counts once (proportional set size).
    """
    peak, ended = [0.0], threading.Event()

    def sample() -> None:
        while not ended.wait(_EVERY_S):
            me, total = psutil.Process(), 0
            for process in [me, *me.children(recursive=True)]:
                with suppress(psutil.NoSuchProcess):  # It has ended since.
                    total += process.memory_full_info().pss
            peak[0] = max(peak[0], total / 2**30)

    thread = threading.Thread(target=sample, name="memory", daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        ended.set()
        thread.join()
