"""The probe of a process group, with the results of a broken transport. Real groups are in tests/dist."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gkd.actor.common.agree import distinct_groups, probe_group
from gkd.errors import ClusterError


@pytest.fixture
def rank_3() -> Iterator[None]:
    """This process is rank 3 of 4. There are no others: torch's fake backend sends nothing."""
    dist.init_process_group("fake", rank=3, world_size=4)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("others", "received"),
    [
        ([0, 1, 0, 0], None),
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
        probe_group("tp", dist.new_group([1, 3]), torch.device("cpu"))
    else:
        with pytest.raises(ClusterError) as raised:
            probe_group("tp", dist.new_group([1, 3]), torch.device("cpu"))
        assert all(text in str(raised.value) for text in ("tp", "[1, 3]", "rank 3", received))


def test_each_group_is_probed_once(rank_3: None) -> None:
    """Fails if one group is probed again under each of its names, or a group of one rank is probed."""
    shared, lone, other = (dist.new_group(ranks) for ranks in ([1, 3], [3], [2, 3]))
    assert distinct_groups({"dp": shared, "dp_cp": shared, "pp": lone, "ep": other}) == {"dp": shared, "ep": other}
