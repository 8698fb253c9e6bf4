"""Memory in use: the host's, and the log line. A GPU's numbers are in tests/gpu."""

from __future__ import annotations

import gc
import logging
import weakref

import pytest
import torch

from gkd.memory.usage import MemoryUsage, clear_memory, gib, log_gpu_memory_usage, read_usage, reset_peak

CPU = torch.device("cpu")
MIB = 1 << 20


def test_without_cuda_no_number_is_a_devices() -> None:
    """Fails if numbers of a CPU run can be taken for a GPU's."""
    reset_peak(CPU)
    usage = read_usage(CPU)
    assert (usage.where, usage.allocated, usage.reserved, usage.peak, usage.free, usage.total) == ("cpu", *[None] * 5)
    assert usage.line() == f"cpu: host RSS {gib(usage.host_rss)} GiB"


def test_the_hosts_memory_is_this_processs() -> None:
    """Fails if the host's numbers do not follow the memory that this process writes to."""
    before = read_usage(CPU).host_rss
    block = torch.ones(64 * MIB // 4)
    after = read_usage(CPU).host_rss
    assert 0.9 * block.nbytes < after - before < 1.5 * block.nbytes


def test_the_line_has_every_number_once(caplog: pytest.LogCaptureFixture) -> None:
    """Fails if a number, its unit, the rank or the device is missing from the log line."""
    usage = MemoryUsage("cuda:1", 5 << 30, 1 << 30, 3 << 30, 2 << 30, 10 << 30, 80 << 30)
    assert usage.line() == (
        "cuda:1: allocated 1.00, reserved 3.00, peak 2.00, 10.00 of the device's 80.00 free; host RSS 5.00 GiB"
    )
    logger = logging.getLogger("test_memory_usage")
    with caplog.at_level(logging.INFO, logger.name):
        log_gpu_memory_usage("after offload", logger, rank=3, device=CPU)
    assert caplog.messages[0].startswith("after offload: rank 3, cpu: host RSS ")
    assert [gib(0), gib(10 << 20), gib(3 << 29)] == ["0.00", "0.0098", "1.50"]


class Cycle:
    """Refers to itself, so that only the garbage collector frees it."""

    def __init__(self) -> None:
        self.me = self


def test_clearing_frees_cyclic_garbage() -> None:
    """Fails if a cycle of objects keeps its tensors over a call that promises to free them."""
    gc.disable()
    try:
        gone = weakref.ref(Cycle())
        assert gone() is not None
        assert clear_memory(CPU) == 0, "there is no cache to return"
        assert gone() is None
    finally:
        gc.enable()
