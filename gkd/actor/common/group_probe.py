"""Check with a small collective that a process group connects exactly its ranks, before work depends on it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from gkd.errors import ClusterError


def probe_group(name: str, group: Any, device: torch.device) -> None:
    """Check by an all-reduce that every member, and no other rank, contributes once. Collective.

    Args:
        group: a ProcessGroup, or None: the default one.

    Raises:
        ClusterError: a contribution of another rank, or a missing one.
    """
    members = dist.get_process_group_ranks(group)
    counts = torch.zeros(dist.get_world_size(), dtype=torch.int32, device=device)
    counts[dist.get_rank()] = 1
    dist.all_reduce(counts, group=group)
    received = {rank: count for rank, count in enumerate(counts.tolist()) if count}
    if received != dict.fromkeys(members, 1):
        raise ClusterError(
            f"group {name} of ranks {sorted(members)}: a probe by rank {dist.get_rank()} received contributions of "
            f"{received} (rank: count). Fix: look for processes of another run on this network, or a broken NCCL "
            f"transport (NCCL_DEBUG=INFO logs which one is used)."
        )


def distinct_groups(groups: Mapping[str, Any]) -> dict[str, Any]:
    """Return the groups of more than one rank, each object once, under its first name."""
    seen: set[int] = set()
    kept = {}
    for name, group in groups.items():
        if id(group) not in seen and dist.get_world_size(group) > 1:
            seen.add(id(group))
            kept[name] = group
    return kept
