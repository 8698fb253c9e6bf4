"""Memory of phases: what is noted of each, and of all ranks together."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from gkd.memory.timeline import Timeline, merge
from gkd.memory.usage import ARENA, GIB, MemoryUsage

CPU = torch.device("cpu")


class Store:
    def __init__(self) -> None:
        self.gib = 0.0

    def on_device(self) -> int:
        return int(self.gib * GIB)


@pytest.fixture
def store() -> Iterator[Store]:
    made = Store()
    ARENA.add("timeline test", made.on_device)
    yield made
    ARENA.remove("timeline test")


def test_each_phase_has_its_own_numbers(store: Store) -> None:
    """Fails if a phase takes another's peak, its memory is read before it ends, or numbers are told twice."""
    timeline, before = Timeline(CPU), ARENA.allocated() / GIB
    store.gib = 5.0
    with timeline.phase("train"):
        store.gib = 7.0
        ARENA.allocated()
        store.gib = 2.0
    with timeline.phase("export"):
        store.gib = 3.0
    taken = timeline.take()
    rss = {name: taken.pop(name) for name in list(taken) if name.endswith("host_rss_gib")}
    assert {name: value - before for name, value in taken.items()} == {
        "memory/train/arena_gib": 2.0,
        "memory/train/arena_peak_gib": 7.0,
        "memory/export/arena_gib": 3.0,
        "memory/export/arena_peak_gib": 3.0,
    }
    assert len(rss) == 2 and all(0.05 < value < 100 for value in rss.values())
    assert timeline.take() == {}


def test_of_a_phase_that_comes_twice_the_largest_counts(store: Store) -> None:
    """Fails if a small evaluation hides that the one before it was near the limit."""
    timeline, before = Timeline(CPU), ARENA.allocated() / GIB
    for size in (4.0, 1.0):
        store.gib = size
        with timeline.phase("evaluation"):
            pass
    assert timeline.take()["memory/evaluation/arena_peak_gib"] - before == 4.0


def test_a_phase_that_fails_is_noted_and_ends(store: Store) -> None:
    """Fails if the phase that ran out of memory is the one whose memory nobody knows, or no phase can begin after."""
    timeline = Timeline(CPU)
    with pytest.raises(ValueError), timeline.phase("train"):
        raise ValueError
    with timeline.phase("evaluation"):
        pass
    assert {"memory/train/arena_gib", "memory/evaluation/arena_gib"} <= timeline.take().keys()


def test_phases_do_not_nest() -> None:
    """Fails if an inner phase may reset the peak of the one around it."""
    timeline = Timeline(CPU)
    with timeline.phase("train"), pytest.raises(RuntimeError, match="export begins inside phase train"):  # noqa: SIM117
        with timeline.phase("export"):
            pass


def test_the_names_of_a_devices_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a GPU's numbers come under other names than the guide gives them, or in another unit."""
    usage = MemoryUsage("cuda:0", 1 * GIB, 3 * GIB, 2 * GIB, 4 * GIB, 80 * GIB, 6 * GIB)
    monkeypatch.setattr("gkd.memory.timeline.read_usage", lambda device: usage)
    monkeypatch.setattr("gkd.memory.timeline.reset_peak", lambda device: None)
    timeline = Timeline(torch.device("cuda", 0))
    with timeline.phase("training_step"):
        pass
    assert timeline.take() == {
        "memory/training_step/allocated_gib": 1.0,
        "memory/training_step/reserved_gib": 3.0,
        "memory/training_step/peak_gib": 2.0,
        "memory/training_step/host_rss_gib": 6.0,
    }


def test_of_all_ranks_the_largest_and_who_it_was() -> None:
    """Fails if the rank that is nearest to its limit does not show, or the wrong one is named."""
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
    each = {name: value for name, value in merge(ranks, each=True).items() if name not in merge(ranks)}
    assert each == {
        "memory/train/peak_gib/rank_0": 3.0,
        "memory/train/peak_gib/rank_1": 5.0,
        "memory/train/peak_gib/rank_2": 5.0,
        "memory/export/peak_gib/rank_2": 0.0,
    }
