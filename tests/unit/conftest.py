"""Fixtures of the unit tests."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gkd.user_code import BATCH_SIGNALS
from tests.unit.local_ray import LocalRay

# Threads only slow the small tensors of these tests down. launch/test.sh sets it for all tests.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture
def in_memory(tmp_path: Path) -> Iterator[Path]:
    """Yield a folder in memory, where flushes are fast. What a killed process leaves does not depend on the disk."""
    if not os.path.isdir("/dev/shm"):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.fixture
def host_has(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Return a function that sets the host memory, in GiB, that preflight finds."""
    return lambda gib: monkeypatch.setattr("gkd.preflight.memory.host_memory_bytes", lambda: gib << 30)


@pytest.fixture(autouse=True)
def own_handlers() -> Iterator[None]:
    """Restore the handlers of signals, which the main functions replace: no test may depend on those before it."""
    numbers = (signal.SIGINT, signal.SIGHUP, signal.SIGALRM, *BATCH_SIGNALS)
    before = {n: signal.getsignal(n) for n in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def flushed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Path, int]]:
    """Return the (path, size) of what was flushed to the disk, in order."""
    found: list[tuple[Path, int]] = []

    def fsync(descriptor: int, flush: Callable[[int], None] = os.fsync) -> None:
        flush(descriptor)
        found.append((Path(os.readlink(f"/proc/self/fd/{descriptor}")), os.fstat(descriptor).st_size))

    monkeypatch.setattr(os, "fsync", fsync)
    return found


@pytest.fixture
def local_ray(monkeypatch: pytest.MonkeyPatch) -> LocalRay:
    """Let the functions of `gkd.cluster.calls` wait for calls of `tests.unit.local_ray.Method`, and judging, too."""
    ray = LocalRay()
    for module in ("gkd.cluster.calls", "gkd.scoring.judged"):
        monkeypatch.setattr(f"{module}.ray", ray)
    return ray
