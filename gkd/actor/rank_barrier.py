"""Run a block on all ranks between two barriers, so that it fails on all ranks or on none."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from gkd.errors import ClusterError, GkdError
from gkd.spans import Phase


class RankBarrier:
    """Barriers of all actor ranks over gloo, which works while a GPU is full.

    The first one makes the group: runs that never move states need no gloo, which fails on hosts whose name does not
    resolve.

    Args:
        timeout_s: how long a rank waits for the others.
        diagnosed: phase -> context manager that turns an out-of-memory error into a diagnosis, see `gkd.memory.oom`.

    Attributes:
        waited_s: seconds that this rank has waited in the barriers so far.
    """

    def __init__(self, timeout_s: float, diagnosed: Callable[[Phase], AbstractContextManager[None]]) -> None:
        self._group: Any = None
        self._timeout = timedelta(seconds=timeout_s)
        self._diagnosed = diagnosed
        self.waited_s = 0.0

    @contextmanager
    def synchronized(self, phase: Phase, *, alone: bool = False) -> Iterator[None]:
        """Run the block after a barrier, and exchange its errors in a second one: it fails on all ranks or on none.

        An error is diagnosed before the others learn of it, because the driver ends the run at the first error. All
        ranks raise the same error, because any of them may be the first to reach the driver.

        Args:
            phase: of the diagnosis.
            alone: skip the barriers.

        Raises:
            OutOfMemory: this rank or another one ran out of memory in the block.
            ClusterError: another rank failed in the block.
        """
        if alone or dist.get_world_size() == 1:
            with self._diagnosed(phase):
                yield
            return
        if self._group is None:
            self._group = dist.new_group(backend="gloo", timeout=self._timeout)
        with self._timed():
            dist.barrier(self._group)
        error: Exception | None = None
        try:
            with self._diagnosed(phase):
                yield
        except Exception as caught:
            error = caught
        errors: list[GkdError | None] = [None] * dist.get_world_size()
        with self._timed():
            dist.all_gather_object(errors, _for_other_ranks(error), group=self._group)
        if error is not None:
            raise error
        for other in errors:
            if other is not None:
                raise other

    @contextmanager
    def _timed(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.waited_s += time.perf_counter() - began


def raised_by_all_ranks(error: BaseException) -> bool:
    """Return whether all ranks raise this error, see `gkd.actor.common.agree`; other errors occur on one rank alone."""
    return isinstance(error, GkdError) and not isinstance(error, ClusterError)


def _for_other_ranks(error: Exception | None) -> GkdError | None:
    """Return this rank's error as the other ranks raise it."""
    if error is None or isinstance(error, GkdError):
        return error
    text = f"actor rank {dist.get_rank()} could not move its states: {type(error).__name__}: {error}"
    return ClusterError("\n".join([text, *traceback.format_exception(error)]))
