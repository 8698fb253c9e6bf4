"""Memory of phases: the numbers of each, and the merge over ranks."""

from __future__ import annotations

import pytest
import torch

from gkd.memory.usage import GIB, MemoryUsage, Timeline, merge
from gkd.spans import Phase
from tests.fake_device import FakeDevice

CPU = torch.device("cpu")


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


def test_the_names_of_a_devices_numbers() -> None:
    """Fails if a GPU's numbers have other names than in docs/memory.md, or another unit."""
    usage = MemoryUsage("cuda:0", 6 * GIB, 1 * GIB, 3 * GIB, 2 * GIB, 4 * GIB, 80 * GIB)
    timeline = Timeline(torch.device("cuda", 0), read=lambda device: usage, reset=lambda device: None)
    with timeline.during(Phase.TRAIN):
        pass
    assert timeline.take() == {
        "memory/training_step/allocated_gib": 1.0,
        "memory/training_step/reserved_gib": 3.0,
        "memory/training_step/peak_gib": 2.0,
        "memory/training_step/host_rss_gib": 6.0,
    }


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
