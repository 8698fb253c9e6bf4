"""Offload one rank's states to host memory between calls, and reload what a call needs.

All ranks synchronize on a barrier before and after each move, so that no rank computes while another one is still
copying. A rank that fails alone, for example out of memory, skips the barriers from then on: the other ranks are
blocked in a collective of the call and will not reach them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from gkd.actor.common.base import Student
from gkd.actor.rank_barrier import RankBarrier, raised_by_all_ranks
from gkd.log import get_logger
from gkd.memory.offload_manager import GIB, state_offload_manager
from gkd.memory.states import GRADS, OPTIMIZER
from gkd.memory.usage import allocation_lines
from gkd.spans import Phase

log = get_logger("memory")

_LEAK_BYTES = 256 << 20  # a student's buffers and the workspaces of kernels are smaller
_MAX_LINES = 5  # largest allocations in the warning
_BUT_PARAMS = (GRADS, OPTIMIZER)
IS_OFFLOAD_STATES = "is_offload_states"
DISABLE_ADAPTER = "disable_adapter"  # key of a call: compute logprobs by the actor without its LoRA adapters
META_KEYS = (IS_OFFLOAD_STATES, DISABLE_ADAPTER)


def check_meta(meta: Mapping[str, Any] | None, allowed: Sequence[str]) -> dict[str, Any]:
    """Return the options of a call. Raises ValueError: the call does not support a key."""
    options = dict(meta or {})
    if unknown := sorted(set(options) - set(allowed)):
        raise ValueError(f"meta has unknown keys {', '.join(unknown)}; this call supports {', '.join(allowed)}")
    return options


def _undiagnosed(phase: Phase) -> AbstractContextManager[None]:
    """No-op context manager."""
    return nullcontext()


class OffloadController:
    """Move one rank's states to host memory and back; a strategy of `state_offload_manager`.

    Every method that moves states is a collective, unless it is called with `alone`.

    Args:
        automatic: offload the states after each call whose `meta` does not specify it.
        timeout_s: how long a rank waits for the others.
        diagnosed: see `RankBarrier`.
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
        diagnosed: Callable[[Phase], AbstractContextManager[None]] = _undiagnosed,
        resident_bytes: Callable[[], int] = lambda: 0,
        span: Callable[[Phase], AbstractContextManager[None]] = _undiagnosed,
    ) -> None:
        self._student, self._device, self._automatic = student, device, automatic
        self._barrier = RankBarrier(timeout_s, diagnosed)
        self._resident_bytes, self._span = resident_bytes, span
        self._metrics: dict[str, float] = {}
        self._reported_bytes = 0
        # Whether a collective call has ever moved states: the same on all ranks, wherever each rank's states are.
        self._ever_moved = automatic

    def offload_states(self, include: Sequence[str] | None = None, *, alone: bool = False) -> None:
        """Offload states, see `States.offload_states`. On CUDA, also release the memory to other processes.

        Args:
            alone: skip the barriers.

        Raises:
            OutOfMemory: this rank or another one ran out of memory.
            ClusterError: another rank failed.
        """
        with self._synchronized(Phase.OFFLOAD, alone):
            self._student.states.offload_states(include)
            self._empty_cache()
            if self._device.type == "cuda" and include is None:
                self._warn_of_leak()

    def reload_states(self, include: Sequence[str] | None = None, *, alone: bool = False) -> None:
        """Reload states, see `States.reload_states`. Arguments and errors as for `offload_states`."""
        try:
            with self._synchronized(Phase.ONLOAD, alone):
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
        meta: Mapping[str, Any] | None = None,
        *,
        alone: bool = False,
        allowed: Sequence[str] = (IS_OFFLOAD_STATES,),
        sync_follows: bool = False,
    ) -> Iterator[None]:
        """Have these states on the device during a call, and afterwards where `meta` or else the settings specify.

        They are moved there after an error, too, even if it was the reload that failed. After an error of this rank
        alone, the barriers are skipped. Without any offloading this is free.

        Args:
            infix: of the metrics' names.
            include: kinds of states; None means all.
            meta: `is_offload_states`: False leaves the states on the device after this call, True offloads them.
            alone: not all ranks make this call; skip the barriers.
            allowed: keys that the call supports in `meta`, of `META_KEYS`.
            sync_follows: this rank sends its weights next, so they stay on the device, unless `meta` specifies it.

        Raises:
            ValueError: an unknown key in `meta`.
        """
        options = check_meta(meta, allowed)
        offload = bool(options.get(IS_OFFLOAD_STATES, self._automatic))
        kinds = _BUT_PARAMS if sync_follows and IS_OFFLOAD_STATES not in options else None
        if not offload and not self._ever_moved:
            if not self._student.states.away():
                yield
                return
            alone = True  # a call of some ranks has offloaded them; the other ranks do not reload
        self._ever_moved |= not alone
        call, before_s = _Call(self, alone), self._barrier.waited_s
        try:
            with state_offload_manager(call, self._metrics, infix, offload, include=include, offload=kinds):
                try:
                    yield
                except BaseException as error:
                    call.alone |= not raised_by_all_ranks(error)
                    raise
        finally:
            name = f"time/{infix}/barrier_wait_s"
            self._metrics[name] = self._metrics.get(name, 0.0) + self._barrier.waited_s - before_s

    def take_metrics(self) -> dict[str, float]:
        """Return and reset the metrics of the calls since the last one.

        They are the numbers of `state_offload_manager`, `time/<infix>/barrier_wait_s`, which is the part of `onload`
        and `offload` that this rank waited for the others, and once states have moved `memory/moved_to_host` and
        `memory/moved_to_device`, in GiB copied.
        """
        metrics, self._metrics = self._metrics, {}
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
    def _synchronized(self, phase: Phase, alone: bool) -> Iterator[None]:
        self._ever_moved |= not alone
        with self._span(phase), self._barrier.synchronized(phase, alone=alone):
            yield


class _Call:
    """The strategy of one call: after a failed reload it skips the barriers."""

    def __init__(self, controller: OffloadController, alone: bool) -> None:
        self._controller, self.alone = controller, alone

    def offload_states(self, include: Sequence[str] | None = None) -> None:
        self._controller.offload_states(include, alone=self.alone)

    def reload_states(self, include: Sequence[str] | None = None) -> None:
        try:
            self._controller.reload_states(include, alone=self.alone)
        except BaseException:
            self.alone = True
            raise

    def allocated_bytes(self) -> int:
        return self._controller.allocated_bytes()
