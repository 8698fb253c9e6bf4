"""Raise an error of one rank on all ranks, so that they do not hang in the next collective."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from gkd.errors import GkdError


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
