"""An error on one rank becomes the same error on all, instead of a hang in the next collective."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from gkd.errors import GkdError


@contextmanager
def same_error(device: torch.device) -> Iterator[None]:
    """A block that every rank of the world enters; if it raises a GkdError on some, all raise the lowest rank's.

    The block itself must hold no collective. Other exceptions go through at once: they are bugs, and whoever
    started the ranks has to end the others.

    Args:
        device: where the world's collectives run.
    """
    error: GkdError | None = None
    try:
        yield
    except GkdError as caught:
        error = caught
    failed = torch.tensor(int(error is not None), device=device)
    dist.all_reduce(failed)
    if not int(failed):
        return
    errors: list[GkdError | None] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, error)
    first = next(e for e in errors if e is not None)
    raise first from error
