"""Offload one rank's states to host memory between calls, and reload what a call needs.

All ranks synchronize on a barrier before and after each move, so that no rank computes while another one is still
copying. A rank that fails alone, for example out of memory, skips the barriers from then on: the other ranks are
blocked in a collective of the call and will not reach them.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from gkd.actor.common.agree import same_error
from gkd.actor.common.base import Student
from gkd.errors import ClusterError, GkdError
from gkd.log import get_logger
from gkd.memory.offload_manager import GIB, state_offload_manager
from gkd.memory.states import GRADS, OPTIMIZER
from gkd.memory.usage import allocation_lines
from gkd.spans import Phase

log = get_logger("memory")

_LEAK_BYTES = 256 << 20  # a student's buffers and the workspaces of kernels are smaller
_MAX_LINES = 5  # largest allocations in the warning
_BUT_PARAMS = (GRADS, OPTIMIZER)
_CPU = torch.device("cpu")


class OffloadController:
    """Move one rank's states to host memory and back; a strategy of `state_offload_manager`.

    Every method that moves states is a collective of all ranks, except in a call of some ranks alone. The barriers are
    over gloo, which works while a GPU is full. The first one makes the group: runs that never move states need no gloo,
    which fails on hosts whose name does not resolve.

    Args:
        automatic: offload the states after each call that does not specify it.
        timeout_s: how long a rank waits for the others.
        diagnosed: phase -> context manager that turns an out-of-memory error into a diagnosis, see `gkd.memory.oom`.
        resident_bytes: device memory of other models that stays allocated while the states are offloaded.
        span: records a move.
    """

    def __init__(
        self,
        student: Student,
        device: torch.device,
        *,
        automatic: bool,
        timeout_s: float,
        diagnosed: Callable[[Phase], AbstractContextManager[object]] = nullcontext,
        resident_bytes: Callable[[], int] = lambda: 0,
        span: Callable[[Phase], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self._student = student
        self._device = device
        self._automatic = automatic
        self._timeout = timedelta(seconds=timeout_s)
        self._diagnosed = diagnosed
        self._resident_bytes = resident_bytes
        self._span = span
        self._group: Any = None  # process group of the barriers
        self._waited_s = 0.0  # time in the barriers so far
        self._alone = False  # skip the barriers: other ranks do not make this call, or have left it
        self._metrics: dict[str, float] = {}
        self._reported_bytes = 0
        # Whether a collective call has ever moved states: the same on all ranks, wherever each rank's states are.
        self._ever_moved = automatic

    def offload_states(self, include: Sequence[str] | None = None) -> None:
        """Offload states, see `States.offload_states`. On CUDA, also release the memory to other processes.

        Raises:
            OutOfMemory: this rank or another one ran out of memory.
            ClusterError: this rank or another one failed for another reason.
        """
        with self._synchronized(Phase.OFFLOAD):
            self._student.states.offload_states(include)
            self._empty_cache()
            if self._device.type == "cuda" and include is None:
                self._warn_of_leak()

    def reload_states(self, include: Sequence[str] | None = None) -> None:
        """Reload states, see `States.reload_states`. Errors as for `offload_states`."""
        try:
            with self._synchronized(Phase.ONLOAD):
                self._student.states.reload_states(include)
        except Exception:
            self._empty_cache()  # it holds the memory of states that had been reloaded before the error
            raise

    def allocated_bytes(self) -> int:
        """Return the bytes that this process has allocated on its GPU; on the CPU, the bytes of the states."""
        on_cuda = self._device.type == "cuda"
        return torch.cuda.memory_allocated(self._device) if on_cuda else self._student.states.allocated_bytes()

    @contextmanager
    def states_on_device(
        self,
        infix: str,
        include: Sequence[str] | None = None,
        is_offload_states: bool | None = None,
        *,
        alone: bool = False,
        sync_follows: bool = False,
    ) -> Iterator[None]:
        """Have these states on the device during a call, and afterwards where the call or else the settings specify.

        This also holds after an error, including a failed reload. After an error of this rank
        alone, the barriers are skipped. Without any offloading this is free.

        Args:
            infix: of the metrics' names.
            include: kinds of states; None means all.
            is_offload_states: True offloads all states after this call, False leaves them on the device. None means as
                configured.
            alone: not all ranks make this call; skip the barriers.
            sync_follows: this rank sends its weights next, so as configured they stay on the device.
        """
        offload = is_offload_states
        kinds = None
        if offload is None:
            offload = self._automatic
            kinds = _BUT_PARAMS if sync_follows else None
        if not offload and not self._ever_moved:
            if not self._student.states.away():
                yield
                return
            alone = True  # a call of some ranks has offloaded them; the other ranks do not reload
        self._ever_moved |= not alone
        self._alone = alone
        before_s = self._waited_s
        try:
            with state_offload_manager(self, self._metrics, infix, offload, include=include, offload=kinds):
                try:
                    yield
                except BaseException as error:
                    # All ranks raise the errors of `gkd.actor.common.agree`; others occur on one rank alone.
                    self._alone |= not isinstance(error, GkdError) or isinstance(error, ClusterError)
                    raise
        finally:
            self._alone = False
            name = f"time/{infix}/barrier_wait_s"
            self._metrics[name] = self._metrics.get(name, 0.0) + self._waited_s - before_s

    def take_metrics(self) -> dict[str, float]:
        """Return and reset the metrics of the calls since the last one.

        They are the numbers of `state_offload_manager`, `time/<infix>/barrier_wait_s`, which is the part of `onload`
        and `offload` that this rank waited for the others, and once states have moved `memory/moved_to_host` and
        `memory/moved_to_device`, in GiB copied.
        """
        metrics = self._metrics
        self._metrics = {}
        if self._ever_moved:
            metrics |= {f"memory/moved_{way}": n / GIB for way, n in self._student.states.take_moved_bytes().items()}
        return metrics

    def _empty_cache(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _warn_of_leak(self) -> None:
        """Warn if much memory stays allocated although all states are offloaded; again only if it grows by half.

        Other processes on the same GPU lack it, and growth from step to step is a memory leak.
        """
        if self._student.states.allocated_bytes():  # a call has reloaded some in the meantime
            return
        left = self.allocated_bytes() - self._resident_bytes()
        if left > max(_LEAK_BYTES, 1.5 * self._reported_bytes):
            self._reported_bytes = left
            largest = "; ".join(allocation_lines(self._device, _MAX_LINES))
            text = "%.2f GiB are still allocated on %s although all states are offloaded; largest allocations: %s"
            log.warning(text, left / GIB, self._device, largest)

    @contextmanager
    def _synchronized(self, phase: Phase) -> Iterator[None]:
        """Run the block between two barriers; the second one exchanges its errors, so it fails on all ranks or on none.

        An error is diagnosed before the others learn of it, because the driver ends the run at the first error.

        Raises:
            OutOfMemory: this rank or another one ran out of memory in the block.
            ClusterError: this rank or another one failed in the block for another reason.
        """
        self._ever_moved |= not self._alone
        with self._span(phase):
            if self._alone or dist.get_world_size() == 1:
                with self._diagnosed(phase):
                    yield
                return
            if self._group is None:
                self._group = dist.new_group(backend="gloo", timeout=self._timeout)
            began = time.perf_counter()
            try:
                dist.barrier(self._group)
                with same_error(_CPU, group=self._group):
                    self._waited_s += time.perf_counter() - began
                    try:
                        with self._diagnosed(phase):
                            yield
                    except GkdError:
                        raise
                    except Exception as error:
                        text = f"actor rank {dist.get_rank()} failed while {phase}: {type(error).__name__}: {error}"
                        raise ClusterError("\n".join([text, *traceback.format_exception(error)])) from error
                    finally:
                        began = time.perf_counter()
            finally:
                self._waited_s += time.perf_counter() - began
