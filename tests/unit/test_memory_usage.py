"""Memory in use: the host's, and the log line. A GPU's numbers are in tests/gpu."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from gkd.memory.usage import (
    MemoryUsage,
    allocation_lines,
    clear_memory,
    gib,
    log_gpu_memory_usage,
    read_usage,
    reset_peak,
)

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


def test_the_largest_allocations_are_named_by_their_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if blocks of one line are not added up, or other devices, freed blocks or blocks without a stack count."""
    root = Path(__file__).parents[2]
    adam = {"filename": "/env/lib/site-packages/torch/optim/adam.py", "line": 120, "name": "_init_group"}
    own = {"filename": f"{root}/gkd/actor/x.py", "line": 7, "name": "step"}

    def segment(device: int, *blocks: tuple[int, str, list[dict[str, Any]]]) -> dict[str, Any]:
        found = [{"size": mib * MIB, "state": state, "frames": frames} for mib, state, frames in blocks]
        return {"device": device, "blocks": found}

    used = "active_allocated"
    segments = [
        segment(0, (256, used, [adam, own]), (1024, used, [own]), (9999, "inactive", [own]), (9999, used, [])),
        segment(0, (256, used, [adam, own]), (128, used, [adam])),
        segment(1, (9999, used, [own])),
    ]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    at_adam, at_own = "torch/optim/adam.py:120 in _init_group", "gkd/actor/x.py:7 in step"
    lines = [f"1.00 GiB: {at_own}", f"0.50 GiB: {at_adam}, called from {at_own}", f"0.12 GiB: {at_adam}"]
    assert allocation_lines(torch.device("cuda", 0), 9) == lines
    assert allocation_lines(torch.device("cuda", 0), 1) == lines[:1]
    assert allocation_lines(CPU, 9) == []


@pytest.fixture
def second_of_three() -> Iterator[None]:
    """Make this process rank 1 of a process group of 3 whose other ranks do not exist."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=3)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("args", "options", "level"),
    [
        ((), {}, None),  # rank 0 alone, as in ROLL and verl
        ((0,), {}, None),
        ((1,), {}, logging.INFO),
        ((None,), {}, logging.INFO),
        ((2, CPU), {}, None),
        ((1, CPU), {}, logging.INFO),
        ((None, CPU), {}, logging.INFO),
        ((), {"rank": None}, logging.INFO),
        ((), {"rank": 1, "device": CPU}, logging.INFO),
        ((), {"level": logging.WARNING, "rank": 1}, logging.WARNING),
        ((), {"level": logging.WARNING, "rank": None}, logging.WARNING),
        ((), {"level": logging.WARNING}, None),
        ((logging.WARNING, 1), {}, logging.WARNING),
        ((logging.WARNING, 0), {}, None),
    ],
)
def test_the_calls_of_other_projects(
    args: tuple[Any, ...],
    options: dict[str, Any],
    level: int | None,
    second_of_three: None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Fails if a call as in ROLL or verl loses its line, another rank than the named one logs, or at another level."""
    logger = logging.getLogger("test_memory_usage")
    with caplog.at_level(logging.DEBUG, logger.name):
        log_gpu_memory_usage("here", logger, *args, **options)
    assert [record.levelno for record in caplog.records] == ([] if level is None else [level])
    assert all("rank 1, " in text for text in caplog.messages)


@pytest.mark.parametrize("rank", [3, -1, logging.INFO])
def test_a_line_that_no_rank_would_log_is_an_error(rank: int, second_of_three: None) -> None:
    """Fails if a rank that does not exist, or a level in its place, loses the line without a word."""
    with pytest.raises(ValueError, match=str(rank)):
        log_gpu_memory_usage("here", None, rank)


def test_without_a_process_group_every_call_logs(caplog: pytest.LogCaptureFixture) -> None:
    """Fails if a single process loses its line because of the rank, or needs a logger."""
    logger = logging.getLogger("test_memory_usage")
    with caplog.at_level(logging.INFO, logger.name):
        for rank in (None, 0, 7):
            log_gpu_memory_usage(head="here", logger=logger, rank=rank)
    heads = [text.partition("cpu")[0] for text in caplog.messages]
    assert heads == ["here: ", "here: rank 0, ", "here: rank 7, "]
    log_gpu_memory_usage("here")


class Cycle:
    """Refers to itself, so that only the garbage collector frees it."""

    def __init__(self) -> None:
        self.me = self


def test_clearing_returns_the_heap_to_the_system() -> None:
    """Fails if what a training step has freed stays with the process: the buffers of the weight sync come on top."""
    blocks = [bytearray(100_000) for _ in range(1000)]  # small enough for the C library's heap
    last = blocks.pop()  # at its end, so that it cannot shrink by itself
    before = read_usage(CPU).host_rss
    blocks.clear()
    clear_memory(CPU)
    assert before - read_usage(CPU).host_rss > 50_000_000 and last


def test_clearing_frees_cyclic_garbage() -> None:
    """Fails if a cycle of objects keeps its tensors over a call that promises to free them, also called as in slime."""
    gc.disable()
    try:
        calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [((), {}), ((CPU,), {}), ((True,), {}), ((False,), {})]
        calls += [((), {"clear_host_memory": True}), ((), {"device": CPU, "clear_host_memory": False})]
        for args, options in calls:
            gone = weakref.ref(Cycle())
            assert gone() is not None
            assert clear_memory(*args, **options) == 0, "there is no cache to return"
            assert gone() is None
    finally:
        gc.enable()
