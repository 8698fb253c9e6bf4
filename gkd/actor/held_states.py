"""One rank's states between the calls on it: on its device, or, where roles share it in time, in host memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from gkd.actor.base import Student
from gkd.log import get_logger
from gkd.memory.holders import holders
from gkd.memory.offload_manager import GIB, state_offload_manager

log = get_logger("memory")

_WORTH_NAMING = 256 << 20  # a student's buffers and what kernels keep for themselves are less
_NAMED = 5
IS_OFFLOAD_STATES = "is_offload_states"
META_KEYS = (IS_OFFLOAD_STATES,)


class HeldStates:
    """A strategy of `state_offload_manager`. Its moves are collectives: the ranks meet before and after each, so that
    none computes while another one still moves.

    Args:
        automatic: after a call the states go to the host, if the call does not say otherwise.
    """

    def __init__(self, student: Student, device: torch.device, *, automatic: bool) -> None:
        self._student, self._device, self._automatic = student, device, automatic
        # On the CPU, whatever the ranks compute on: this must work where the device is full.
        self._ranks: Any = dist.new_group(backend="gloo") if dist.get_world_size() > 1 else None
        self._metrics: dict[str, float] = {}
        self._named = 0
        self._alone = False

    def offload_states(self, include: Sequence[str] | None = None, *, non_blocking: bool = False) -> None:
        """See `States.offload`. On CUDA the memory goes back to the device, so that other processes can have it."""
        with self._met():
            self._student.states.offload(include, non_blocking=non_blocking)
            if self._device.type == "cuda" and not non_blocking:
                torch.cuda.empty_cache()
                if include is None:
                    self._name_who_stays()

    def reload_states(self, include: Sequence[str] | None = None, *, non_blocking: bool = False) -> None:
        """See `States.reload`."""
        with self._met():
            self._student.states.reload(include, non_blocking=non_blocking)

    def allocated_bytes(self) -> int:
        """Of this process on its GPU; on the CPU of the states alone."""
        if self._device.type == "cuda":
            return torch.cuda.memory_allocated(self._device)
        return self._student.states.allocated()

    @contextmanager
    def needed(
        self,
        infix: str,
        include: Sequence[str] | None = None,
        meta: Mapping[str, Any] | None = None,
        *,
        alone: bool = False,
    ) -> Iterator[None]:
        """These states are on the device for the time of a call; where they are afterwards is `meta`'s say, and else
        the setting's. Costs nothing where the states never move.

        Args:
            infix: of the metrics' names.
            include: None: all.
            meta: `is_offload_states`: False: they stay on the device after this call; True: they go to the host.
            alone: not all ranks are in this call, so that they cannot meet.

        Raises:
            ValueError: another key in `meta`.
        """
        given = meta or {}
        if wrong := sorted(set(given) - set(META_KEYS)):
            raise ValueError(f"a call's meta knows {', '.join(META_KEYS)}, not {', '.join(wrong)}")
        offload = bool(given.get(IS_OFFLOAD_STATES, self._automatic))
        if not offload and not self._student.states.away():
            yield
            return
        self._alone = alone
        try:
            with state_offload_manager(self, self._metrics, infix, offload, include=include):
                yield
        finally:
            self._alone = False

    def take_metrics(self) -> dict[str, float]:
        """What the calls since the last one measured."""
        metrics, self._metrics = self._metrics, {}
        return metrics

    def _name_who_stays(self) -> None:
        """All states have gone: say who has memory on the GPU all the same, again only if it becomes half as much more.

        Others who share the GPU miss it, and where it grows from step to step somebody keeps what he should not.
        """
        left = self.allocated_bytes()
        if left > max(_WORTH_NAMING, 1.5 * self._named):
            self._named = left
            found = "; ".join(holder.line() for holder in holders(self._device)[:_NAMED])
            log.warning("%.2f GiB stay allocated on %s while the states are away: %s", left / GIB, self._device, found)

    @contextmanager
    def _met(self) -> Iterator[None]:
        meets = self._ranks is not None and not self._alone
        if meets:
            dist.barrier(self._ranks)
        yield
        if meets:
            dist.barrier(self._ranks)
