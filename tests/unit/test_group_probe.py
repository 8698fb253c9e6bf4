"""The probe of a process group, on answers that a broken transport would give; the real ones are in tests/dist."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from gkd.actor.common.group_probe import distinct_groups, probe_group
from gkd.errors import ClusterError

MEMBERS = [1, 3]


@pytest.fixture
def rank_3(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is rank 3 of 4, in a group with rank 1."""
    monkeypatch.setattr(dist, "get_rank", lambda: 3)
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: len(group) if group else 4)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: group)


@pytest.mark.parametrize(
    ("others", "heard"),
    [
        ([0, 1, 0, 0], None),
        ([0, 0, 0, 0], "{3: 1}"),  # nobody came
        ([0, 1, 1, 0], "{1: 1, 2: 1, 3: 1}"),  # and somebody else
        ([0, 1, 0, 1], "{1: 1, 3: 2}"),  # another process that believes to be this rank
    ],
)
def test_a_group_of_the_wrong_ranks_is_found(
    rank_3: None, monkeypatch: pytest.MonkeyPatch, others: list[int], heard: str | None
) -> None:
    """Fails if a group that connects other ranks than it should is trained with, and gradients are wrong in silence."""

    def add(marks: torch.Tensor, group: Any) -> None:
        marks += torch.tensor(others, dtype=marks.dtype)

    monkeypatch.setattr(dist, "all_reduce", add)
    if heard is None:
        probe_group("tp", MEMBERS, torch.device("cpu"))
    else:
        with pytest.raises(ClusterError) as raised:
            probe_group("tp", MEMBERS, torch.device("cpu"))
        assert f"group tp of ranks [1, 3]: a probe of it by rank 3 heard {heard} (rank: times)" in str(raised.value)


def test_each_group_is_probed_once(rank_3: None) -> None:
    """Fails if one group is probed under many names, which takes as many times as long, or a lone rank is."""
    shared, lone = [1, 3], [3]
    assert distinct_groups({"dp": shared, "dp_cp": shared, "pp": lone, "ep": [2, 3]}) == {"dp": shared, "ep": [2, 3]}
