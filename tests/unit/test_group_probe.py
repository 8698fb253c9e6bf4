"""The probe of a process group, with the results of a broken transport. Real groups are in tests/dist."""

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
    ("others", "received"),
    [
        ([0, 1, 0, 0], None),
        ([0, 0, 0, 0], "{3: 1}"),  # no other rank contributed
        ([0, 1, 1, 0], "{1: 1, 2: 1, 3: 1}"),  # a rank of another group contributed, too
        ([0, 1, 0, 1], "{1: 1, 3: 2}"),  # another process has the same rank
    ],
)
def test_a_group_of_the_wrong_ranks_is_detected(
    rank_3: None, monkeypatch: pytest.MonkeyPatch, others: list[int], received: str | None
) -> None:
    """Fails if training uses a group of the wrong ranks, so that gradients are silently wrong."""

    def add(counts: torch.Tensor, group: Any) -> None:
        counts += torch.tensor(others, dtype=counts.dtype)

    monkeypatch.setattr(dist, "all_reduce", add)
    if received is None:
        probe_group("tp", MEMBERS, torch.device("cpu"))
    else:
        with pytest.raises(ClusterError) as raised:
            probe_group("tp", MEMBERS, torch.device("cpu"))
        assert all(text in str(raised.value) for text in ("tp", "[1, 3]", "rank 3", received))


def test_each_group_is_probed_once(rank_3: None) -> None:
    """Fails if one group is probed again under each of its names, or a group of one rank is probed."""
    shared, lone = [1, 3], [3]
    assert distinct_groups({"dp": shared, "dp_cp": shared, "pp": lone, "ep": [2, 3]}) == {"dp": shared, "ep": [2, 3]}
