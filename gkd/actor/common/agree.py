"""An error on one rank becomes the same error on all, instead of a hang in the next collective."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from gkd.errors import GkdError


@dataclass(slots=True)
class Agreement:
    """What the ranks told each other at the end of a block."""

    largest: int = 0  # of the ranks' `count`


@contextmanager
def same_error(device: torch.device, count: int = 0) -> Iterator[Agreement]:
    """A block that every rank of the world enters; if it raises a GkdError on some, all raise the lowest rank's.

    The block itself must hold no collective. Other exceptions go through at once: they are bugs, and whoever
    started the ranks has to end the others.

    Args:
        device: where the world's collectives run.
        count: a number that travels with the news.

    Yields:
        What holds the largest count of any rank, once the block is over.
    """
    error: GkdError | None = None
    agreement = Agreement()
    try:
        yield agreement
    except GkdError as caught:
        error = caught
    news = torch.tensor([int(error is not None), count], device=device)
    dist.all_reduce(news, op=dist.ReduceOp.MAX)
    failed, agreement.largest = news.tolist()
    if not failed:
        return
    errors: list[GkdError | None] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, error)
    first = next(e for e in errors if e is not None)
    raise first from error
