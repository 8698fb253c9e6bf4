"""Compare ratios of constructed snapshots with manually computed numbers."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from gkd.memory.fragmentation import (
    Fragmentation,
    FragmentationWatch,
    check_fragmentation,
    measure,
)
from gkd.memory.usage import MemoryUsage

MIB = 1 << 20
USED, FREE, PENDING = "active_allocated", "inactive", "active_pending_free"


def segment(*blocks: tuple[str, int], large: bool = True, address: int = 0, **more: Any) -> dict[str, Any]:
    """A segment as torch lists it; blocks as (state, MiB), in order."""
    listed, at = [], address
    for state, mib in blocks:
        listed.append({"address": at, "size": mib * MIB, "requested_size": mib * MIB, "state": state})
        at += mib * MIB
    return {
        "device": 0,
        "address": address,
        "total_size": at - address,
        "segment_type": "large" if large else "small",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "stream": 0,
        "blocks": listed,
    } | more


def in_mib(found: Fragmentation) -> dict[str, float]:
    names = ("allocated", "pending", "reserved", "free", "largest_free", "releasable", "elsewhere")
    return {name: getattr(found, name) / MIB for name in names}


def test_a_snapshot_by_hand() -> None:
    """Fails if a block in use counts as free, one that waits for a stream counts as either, or a ratio is another."""
    found = measure(
        [
            segment((USED, 100), (FREE, 60), (USED, 40)),
            segment((FREE, 30), (PENDING, 20), (FREE, 50)),
            segment((FREE, 100)),
            segment((USED, 1), (FREE, 1), large=False),
            segment((USED, 8), (FREE, 9), segment_pool_id=(0, 1)),
        ],
        "cuda:0",
    )
    assert in_mib(found) == {
        "allocated": 100 + 40 + 1 + 8,
        "pending": 20,
        "reserved": 200 + 100 + 100 + 2 + 17,
        "free": 60 + 30 + 50 + 100 + 1 + 9,
        "largest_free": 100,
        "releasable": 100,  # the only segment that is free as a whole
        "elsewhere": 1 + 9,
    }
    assert found.external_ratio == pytest.approx(1 - 100 / 250)
    assert found.unused_ratio == pytest.approx((419 - 149) / 419)


def test_of_expandable_segments_whole_pages_can_go_back() -> None:
    """Fails if a page of 20 MiB that a block in use reaches into counts as one that can be given back."""
    # Pages end at 20, 40, 60, 80: the free blocks are 15 to 65, two whole pages, and 70 to 80, none.
    blocks = ((USED, 15), (FREE, 50), (USED, 5), (FREE, 10))
    for address in (0, 7 << 40):
        found = measure([segment(*blocks, address=address, is_expandable=True)], "cuda:0")
        assert (found.releasable / MIB, found.free / MIB) == (40, 60)
    assert measure([segment(*blocks)], "cuda:0").releasable == 0


def test_nothing_is_no_fragmentation() -> None:
    """Fails if a rank that has allocated nothing, or has nothing free, divides by zero or is warned."""
    for segments in ([], [segment((USED, 10))]):
        found = measure(segments, "cuda:0")
        assert (found.external_ratio, found.unused_ratio, found.over(0.0)) == (0.0, 0.0, False)


@pytest.mark.parametrize(
    ("used", "free", "over"),
    [
        (1000, [400, 300, 300], True),  # 0.6 and 0.5
        (1000, [1000], False),  # in one piece
        (9000, [400, 300, 300], False),  # a tenth of all is unused
        (100, [200, 100, 100], False),  # 0.5 and 0.8, but of 400 MiB
    ],
)
def test_a_warning_takes_much_unused_in_pieces(used: int, free: list[int], over: bool) -> None:
    """Fails if a healthy cache is warned of, or memory that lies in pieces is not."""
    found = measure([segment((USED, used)), *(segment((FREE, mib), (USED, 0)) for mib in free)], "cuda:0")
    assert found.over(0.2) == over
    whole = measure([segment((USED, used)), *(segment((FREE, mib)) for mib in free)], "cuda:0")
    assert not whole.over(0.2), "all of it can go back to the device, and come again in one piece"
    # As after the first step on a real card: 24 of 25 GiB of free memory are whole segments.
    mixed = measure([segment((USED, 26_000), (FREE, 640), (USED, 1)), *[segment((FREE, 500))] * 50], "cuda:0")
    assert min(mixed.external_ratio, mixed.unused_ratio) > 0.4 and not mixed.over(0.2)


def test_the_report_and_the_warning(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Fails if the report lacks the device, the ratios or the allocator's calls, or a warning comes without a remedy or
    below the limit.
    """
    logger = logging.getLogger("test_memory_fragmentation")
    found = measure([segment((FREE, 600), (USED, 500), (FREE, 500))], "cuda:0")  # 0.4545, 0.6875
    usage = MemoryUsage("cuda:0", 5 << 30, 500 * MIB, 1600 * MIB, 2 << 30, 10 << 30, 80 << 30)
    card = {
        "fragmentation": found,
        "read_usage": usage,
        "read_counts": {"alloc_retries": 7, "ooms": 6, "device_allocs": 512, "device_frees": 256},
    }
    for name, value in card.items():
        monkeypatch.setattr(f"gkd.memory.fragmentation.{name}", lambda device, value=value: value)
    with caplog.at_level(logging.INFO, logger.name):
        assert check_fragmentation(torch.device("cuda", 0), warn=0.46, logger=logger) is found
    (report,) = caplog.messages
    assert usage.line() in report and found.line() in report and "reserved 1.56" in report
    assert [int(word) for word in report.splitlines()[-1].split() if word.isdecimal()] == [7, 6, 512, 256]
    caplog.clear()
    check_fragmentation(torch.device("cuda", 0), warn=0.45, logger=logger)
    (message,) = caplog.messages
    assert all(number in message for number in ("0.45", "0.69", "0.59"))
    for word in ("0.45", "expandable_segments:True", "actor.fsdp_cpu_offload"):
        assert word in message


def test_every_tenth_step_is_looked_at(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Fails if each step pays for a list of all blocks, none does, or a number is reported twice."""
    logger, looks = logging.getLogger("test_memory_fragmentation"), []
    found = measure([segment((USED, 3), (FREE, 1))], "cuda:0")

    def look(device: torch.device) -> Fragmentation:
        looks.append(device)
        return found

    monkeypatch.setattr("gkd.memory.fragmentation.fragmentation", look)
    watch = FragmentationWatch(torch.device("cuda", 0), logger)
    told = []
    for _ in range(21):
        watch.after_step()
        told.append(watch.take())
    numbers = {"memory/external_ratio": 0.0, "memory/unused_ratio": 0.25}
    assert told == [numbers if step % 10 == 0 else {} for step in range(21)]
    assert len(looks) == 3


def test_without_a_caching_allocator_there_is_none(caplog: pytest.LogCaptureFixture) -> None:
    """Fails if a run on CPU reports or warns of a fragmentation that cannot be."""
    logger, cpu = logging.getLogger("test_memory_fragmentation"), torch.device("cpu")
    found = check_fragmentation(cpu, warn=0.0, logger=logger)
    assert (found.external_ratio, found.unused_ratio, found.free) == (0.0, 0.0, 0)
    assert found == measure([], "cpu") and "cpu" in found.line()
    assert torch.cuda.is_initialized() or check_fragmentation(logger=logger) == found
    watch = FragmentationWatch(cpu, logger)
    watch.after_step()
    assert watch.take() == {} and not caplog.messages
