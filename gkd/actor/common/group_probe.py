"""Does a process group really connect the ranks it should? A small collective says so before work depends on it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from gkd.errors import ClusterError


def probe_group(name: str, group: Any, device: torch.device) -> None:
    """Every member adds a mark at its own rank; all must see all members' marks, once each. Collective.

    Args:
        group: a ProcessGroup, or None: the default one.

    Raises:
        ClusterError: somebody else's mark, or one that is missing.
    """
    members = dist.get_process_group_ranks(group)
    marks = torch.zeros(dist.get_world_size(), dtype=torch.int32, device=device)
    marks[dist.get_rank()] = 1
    dist.all_reduce(marks, group=group)
    came = {rank: count for rank, count in enumerate(marks.tolist()) if count}
    if came != dict.fromkeys(members, 1):
        raise ClusterError(
            f"group {name} of ranks {sorted(members)}: a probe of it by rank {dist.get_rank()} heard "
            f"{came} (rank: times). Fix: look for processes of another run on this network, or a broken NCCL transport "
            f"(NCCL_DEBUG=INFO says which is used)."
        )


def distinct_groups(groups: Mapping[str, Any]) -> dict[str, Any]:
    """Those of more than one rank, one of each set of ranks and object; the names of the others are dropped."""
    seen: set[int] = set()
    kept = {}
    for name, group in groups.items():
        if id(group) not in seen and dist.get_world_size(group) > 1:
            seen.add(id(group))
            kept[name] = group
    return kept
