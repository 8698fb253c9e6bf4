"""What is in use: the arena that stands for a device, the host's memory, and the line for people."""

from __future__ import annotations

import gc
import logging

import pytest
import torch

from gkd.memory.usage import ARENA, ARENA_LABEL, Arena, MemoryUsage, clear_memory, gib, log_gpu_memory_usage, read_usage

CPU = torch.device("cpu")
MIB = 1 << 20


class Store:
    """Keeps bytes "on the device"."""

    def __init__(self, n_bytes: int) -> None:
        self.n_bytes = n_bytes

    def on_device(self) -> int:
        return self.n_bytes


def test_the_arena_adds_up_what_it_is_told() -> None:
    """Fails if a second store's bytes replace the first one's, or the same store counts twice."""
    arena = Arena()
    actor, teacher = Store(3), Store(4)
    arena.add("actor", actor.on_device)
    arena.add("teacher", teacher.on_device)
    arena.add("actor", actor.on_device)
    assert (arena.allocated(), arena.by_name()) == (7, {"actor": 3, "teacher": 4})
    arena.remove("teacher")
    assert arena.allocated() == 3
    with pytest.raises(KeyError):
        arena.remove("teacher")


def test_the_meter_keeps_nothing_alive() -> None:
    """Fails if asking how much a store holds is why it still holds it."""
    arena, store = Arena(), Store(5)
    arena.add("store", store.on_device)
    arena.add("function", lambda: 2)
    assert arena.allocated() == 7
    del store
    gc.collect()
    assert arena.by_name() == {"function": 2}


def test_the_arenas_peak_is_of_what_was_read_since_the_reset() -> None:
    """Fails if a peak outlives its reset, or a phase that only shrinks has a smaller peak than it began with."""
    arena, store = Arena(), Store(9)
    arena.add("store", store.on_device)
    assert arena.peak() == 9
    store.n_bytes = 1
    assert (arena.allocated(), arena.peak()) == (1, 9)
    arena.reset_peak()
    assert arena.peak() == 1


def test_without_cuda_nothing_is_called_a_gpus() -> None:
    """Fails if numbers of a CPU run can be read as a GPU's."""
    store = Store(6 * MIB)
    before = read_usage(CPU)
    ARENA.add("test", store.on_device)
    try:
        usage = read_usage(CPU)
        assert usage.where == ARENA_LABEL and "cuda" not in usage.line()
        assert usage.allocated - before.allocated == 6 * MIB
        assert (usage.free, usage.total, usage.reserved) == (None, None, usage.allocated)
    finally:
        ARENA.remove("test")


def test_the_hosts_memory_is_this_processs() -> None:
    """Fails if the host's numbers do not follow what this process touches."""
    before = read_usage(CPU).host_rss
    block = torch.ones(64 * MIB // 4)
    after = read_usage(CPU).host_rss
    assert 0.9 * block.nbytes < after - before < 1.5 * block.nbytes


def test_the_line_says_everything_once(caplog: pytest.LogCaptureFixture) -> None:
    """Fails if a number, its unit, the rank or the place is missing from the line that users know."""
    usage = MemoryUsage("cuda:1", 1 << 30, 3 << 30, 2 << 30, 10 << 30, 80 << 30, 5 << 30)
    assert usage.line() == (
        "cuda:1: allocated 1.00, reserved 3.00, peak 2.00, 10.00 of the device's 80.00 free; host RSS 5.00 GiB"
    )
    logger = logging.getLogger("test_memory_usage")
    with caplog.at_level(logging.INFO, logger.name):
        log_gpu_memory_usage("after offload", logger, rank=3)
    assert caplog.messages[0].startswith(f"after offload: rank 3, {ARENA_LABEL}: allocated ")
    assert [gib(0), gib(10 << 20), gib(3 << 29)] == ["0.00", "0.0098", "1.50"]


def test_clearing_gives_back_what_only_garbage_holds() -> None:
    """Fails if a cycle of objects keeps its memory over a call that promises to free it, or the answer is not that."""
    store = Store(8)
    store.me = store  # type: ignore[attr-defined]
    gc.disable()
    try:
        ARENA.add("garbage", store.on_device)
        del store
        assert ARENA.by_name()["garbage"] == 8
        assert clear_memory(CPU) == 8
        assert clear_memory(CPU) == 0
    finally:
        gc.enable()
        ARENA.remove("garbage")
