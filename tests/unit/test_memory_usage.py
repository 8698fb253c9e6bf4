"""Memory in use: the host's, the log line, phases, and the allocator's calls. A GPU's numbers are in tests/gpu."""

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

from gkd.actor.rank import RankMemory
from gkd.config.load import load_config
from gkd.memory.usage import (
    CountMeter,
    Timeline,
    allocation_lines,
    clear_memory,
    gib,
    log_gpu_memory_usage,
    merge,
    read_counts,
    read_usage,
    reset_peak,
    trim_heap,
)
from gkd.spans import Phase, SpanRecorder
from tests.fake_device import FakeDevice
from tests.unit.test_garbage import Node

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
    trim_heap()  # memory that earlier tests have freed would hold the block
    before = read_usage(CPU).host_rss
    block = torch.ones(64 * MIB // 4)
    after = read_usage(CPU).host_rss
    assert 0.9 * block.nbytes < after - before < 1.5 * block.nbytes


def test_a_heap_of_small_blocks_is_returned_unless_it_may_be_kept() -> None:
    """Fails if what a training step has freed stays with the process, so that the buffers of the weight sync come on
    top, or if a small model's step returns memory that it needs again.
    """
    blocks = [b"x" * 50_000 for _ in range(2000)]
    del blocks[::2]  # blocks between others: the C library does not return them by itself
    before = read_usage(CPU).host_rss
    trim_heap(1 << 40)
    kept = read_usage(CPU).host_rss
    clear_memory(CPU)
    assert before - kept < 5 * MIB and kept - read_usage(CPU).host_rss > 30 * MIB
    assert len(blocks) == 1000


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
    dist.init_process_group("fake", rank=1, world_size=3)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("args", "options", "level"),
    [
        ((), {}, None),  # rank 0 alone, as in ROLL and verl
        ((1,), {}, logging.INFO),
        ((2, CPU), {}, None),
        ((None, CPU), {}, logging.INFO),
        ((), {"level": logging.WARNING, "rank": 1}, logging.WARNING),
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


@pytest.mark.parametrize("rank", [-1, logging.INFO])
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
    assert [text.partition("cpu")[0] for text in caplog.messages] == ["here: ", "here: rank 0, ", "here: rank 7, "]
    log_gpu_memory_usage("here")


def test_clearing_frees_cyclic_garbage() -> None:
    """Fails if a cycle of objects keeps its tensors over a call that promises to free them, also called as in slime."""
    gc.disable()
    try:
        calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [((CPU,), {}), ((True,), {})]
        for args, options in [*calls, ((), {"device": CPU, "clear_host_memory": False})]:
            gone = weakref.ref(Node())
            assert gone() is not None
            assert clear_memory(*args, **options) == 0, "there is no cache to return"
            assert gone() is None
    finally:
        gc.enable()


def on_fake(device: FakeDevice) -> Timeline:
    return Timeline(CPU, read=device.read, reset=device.reset_peak)


def test_each_phase_has_its_own_numbers() -> None:
    """Fails if a phase has another's peak, its memory is read before it ends, or numbers are returned twice."""
    device = FakeDevice(5.0)
    timeline = on_fake(device)
    with timeline.during(Phase.TRAIN):
        device.gib = 7.0
        device.read(CPU)
        device.gib = 2.0
    with timeline.during(Phase.EXPORT):
        device.gib = 3.0
    taken = timeline.take()
    rss = {name: taken.pop(name) for name in list(taken) if name.endswith("host_rss_gib")}
    assert taken == {
        "memory/training_step/allocated_gib": 2.0,
        "memory/training_step/reserved_gib": 2.0,
        "memory/training_step/peak_gib": 7.0,
        "memory/export/allocated_gib": 3.0,
        "memory/export/reserved_gib": 3.0,
        "memory/export/peak_gib": 3.0,
    }
    assert len(rss) == 2 and all(0.05 < value < 100 for value in rss.values())
    assert timeline.take() == {}


def test_on_the_cpu_only_the_host_is_recorded() -> None:
    """Fails if a run without a GPU reports a device's memory."""
    timeline = Timeline(CPU)
    with timeline.during(Phase.TRAIN):
        pass
    assert timeline.take().keys() == {"memory/training_step/host_rss_gib"}


def test_a_repeated_phase_keeps_its_largest_numbers() -> None:
    """Fails if a small evaluation hides that the one before it was near the limit."""
    device = FakeDevice()
    timeline = on_fake(device)
    for size in (4.0, 1.0):
        device.gib = size
        with timeline.during(Phase.EVALUATE):
            pass
    assert timeline.take()["memory/evaluation/peak_gib"] == 4.0


def test_a_phase_that_raises_is_recorded_and_closed() -> None:
    """Fails if the phase that ran out of memory is not recorded, or no phase can start after it."""
    timeline = on_fake(FakeDevice())
    with pytest.raises(ValueError), timeline.during(Phase.TRAIN):
        raise ValueError
    with timeline.during(Phase.EVALUATE):
        pass
    assert {"memory/training_step/peak_gib", "memory/evaluation/peak_gib"} <= timeline.take().keys()


def test_the_maximum_over_ranks_and_its_rank() -> None:
    """Fails if the rank that is nearest to its limit is missing, or the wrong rank is named."""
    ranks = [
        {"memory/train/peak_gib": 3.0, "memory/train/allocated_gib": 2.0},
        {"memory/train/peak_gib": 5.0, "memory/train/allocated_gib": 1.0},
        {"memory/train/peak_gib": 5.0, "memory/export/peak_gib": 0.0},
    ]
    assert merge(ranks) == {
        "memory/train/peak_gib": 5.0,
        "memory/train/peak_rank": 1.0,
        "memory/train/allocated_gib": 2.0,
        "memory/export/peak_gib": 0.0,
        "memory/export/peak_rank": 2.0,
    }
    assert merge([]) == merge([{}]) == {}


_COUNTS = ("alloc_retries", "ooms", "device_allocs", "device_frees")
NAMES = [f"memory/{name}" for name in _COUNTS]


def test_each_step_has_its_own_counts() -> None:
    """Fails if a step reports the calls of the steps before it, or one count under the name of another."""
    counts = (dict(zip(_COUNTS, row, strict=True)) for row in [(0, 0, 100, 1), (3, 1, 160, 51), (3, 1, 160, 51)])
    meter = CountMeter(torch.device("cuda", 0), read=lambda device: next(counts))
    taken = [meter.take() for _ in range(3)]
    assert [list(numbers) for numbers in taken] == [NAMES] * 3
    assert [list(numbers.values()) for numbers in taken] == [[0, 0, 100, 1], [3, 1, 60, 50], [0, 0, 0, 0]]


def test_a_rank_reports_torchs_own_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Fails if a count is read under a name that torch does not use for it, or is not in a rank's metrics."""
    stats, cuda = {"num_alloc_retries": 1, "num_ooms": 2, "num_device_alloc": 3, "num_device_free": 4}, "cuda:0"
    assert all(f'"{name}"' in (torch.cuda.memory_stats.__doc__ or "") for name in stats)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: stats)
    assert read_counts(torch.device(cuda)) == dict(zip(_COUNTS, (1, 2, 3, 4), strict=True))
    config, log = load_config(None, []), logging.getLogger("test_allocator_counts")
    rank = RankMemory(config, torch.device(cuda), tmp_path, "actor rank 0", SpanRecorder("actor 0"), log)
    assert rank.take() == dict(zip(NAMES, (1, 2, 3, 4), strict=True))


def test_without_cuda_there_are_none() -> None:
    """Fails if a run on CPU reports counts of an allocator that it does not have."""
    cpu = torch.device("cpu")
    assert read_counts(cpu) == {} and CountMeter(cpu).take() == {}
