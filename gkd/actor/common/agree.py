"""Raise an error of one rank on all ranks, so that they do not hang in the next collective; probe process groups."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from gkd.errors import ClusterError, GkdError


@dataclass(slots=True)
class Agreement:
    """Result of the exchange between ranks at the end of a block."""

    largest: int = 0  # largest of the ranks' `count`


@contextmanager
def same_error(device: torch.device, count: int = 0, *, group: Any = None) -> Iterator[Agreement]:
    """Run a block on every rank of the world; if it raises a GkdError on some ranks, all raise the lowest rank's.

    The block must not contain a collective. Other exceptions are raised at once on their rank alone: they are bugs, and
    the driver ends the other ranks.

    Args:
        device: device of the group's collectives.
        count: a number to exchange in the same collective.
        group: a process group of all ranks; None means the world.

    Yields:
        The agreement; after the block it has the largest `count` of all ranks.
    """
    error: GkdError | None = None
    agreement = Agreement()
    try:
        yield agreement
    except GkdError as caught:
        error = caught
    largest = torch.tensor([int(error is not None), count], device=device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    failed, agreement.largest = largest.tolist()
    if not failed:
        return
    errors: list[GkdError | None] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, error, group=group)
    first = next(e for e in errors if e is not None)
    raise first from error


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
