"""One rank's states between the calls on it: on its device, or, where roles share it in time, in host memory."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from gkd.actor.common.base import Student
from gkd.errors import ClusterError, GkdError
from gkd.log import get_logger
from gkd.memory.offload_manager import GIB, state_offload_manager
from gkd.memory.referrers import holders
from gkd.memory.states import Moves
from gkd.memory.usage import read_usage

log = get_logger("memory")

_WORTH_NAMING = 256 << 20  # a student's buffers and what kernels keep for themselves are less
_NAMED = 5
_OFFLOADING = "offloading states"
IS_OFFLOAD_STATES = "is_offload_states"
DISABLE_ADAPTER = "disable_adapter"  # of a call that computes logprobs: the actor's without what it has learned
META_KEYS = (IS_OFFLOAD_STATES, DISABLE_ADAPTER)


def check_meta(meta: Mapping[str, Any] | None, known: Sequence[str]) -> dict[str, Any]:
    """What a call is told beside its work. Raises ValueError: a key that this call has no use for."""
    given = dict(meta or {})
    if wrong := sorted(set(given) - set(known)):
        raise ValueError(f"a call's meta knows {', '.join(known)}, not {', '.join(wrong)}")
    return given


def _as_it_is(phase: str) -> AbstractContextManager[None]:
    """Explains nothing."""
    return nullcontext()


class OffloadController:
    """A strategy of `state_offload_manager`. Its moves are collectives: the ranks meet before and after each, so that
    none computes while another one still moves; and if one cannot move its states, all of them know.

    Args:
        automatic: after a call the states go to the host, if the call does not say otherwise.
        timeout_s: how long the ranks wait for one another.
        diagnosed: within what it gives, memory that runs out in a phase is explained, see `gkd.memory.oom`.
        staying: bytes of others that stay on the device by design while the states are away.
    """

    def __init__(
        self,
        student: Student,
        device: torch.device,
        *,
        automatic: bool,
        timeout_s: float,
        diagnosed: Callable[[str], AbstractContextManager[None]] = _as_it_is,
        staying: Callable[[], int] = lambda: 0,
    ) -> None:
        self._student, self._device, self._automatic = student, device, automatic
        # On the CPU, whatever the ranks compute on: this must work where the device is full.
        several = dist.get_world_size() > 1
        self._ranks: Any = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s)) if several else None
        self._diagnosed, self._staying = diagnosed, staying
        self._metrics: dict[str, float] = {}
        self._named = 0
        self._waited_s = 0.0
        # Have states ever been told to move? All ranks give the same answer, wherever each one's states are.
        self._moving = automatic

    def offload_states(
        self, include: Sequence[str] | None = None, *, non_blocking: bool = False, alone: bool = False
    ) -> Moves:
        """See `States.offload`. On CUDA the memory goes back to the device, so that other processes can have it.

        Args:
            non_blocking: copies may be under way when this returns; `wait` on what is returned is a collective, too.
            alone: this rank does it without the others: no collective.

        Raises:
            OutOfMemory: a rank, this or another one, ran out of memory.
            ClusterError: another rank could not.
        """
        with self._met(_OFFLOADING, alone):
            moves = self._student.states.offload(include, non_blocking=non_blocking)
            if not non_blocking:
                self._give_back(include)
        return Moves(lambda: self._end(moves, include, alone)) if non_blocking else moves

    def reload_states(
        self, include: Sequence[str] | None = None, *, non_blocking: bool = False, alone: bool = False
    ) -> Moves:
        """See `States.reload`. Arguments and errors as of `offload_states`."""
        try:
            with self._met("reloading states", alone):
                return self._student.states.reload(include, non_blocking=non_blocking)
        except Exception:
            self._empty_cache()  # what had come already, and lies in torch's cache now
            raise

    def allocated_bytes(self) -> int:
        """Of this process on its GPU; on the CPU of the states alone."""
        return read_usage(self._device).allocated

    @contextmanager
    def needed(
        self,
        infix: str,
        include: Sequence[str] | None = None,
        meta: Mapping[str, Any] | None = None,
        *,
        alone: bool = False,
        known: Sequence[str] = (IS_OFFLOAD_STATES,),
    ) -> Iterator[None]:
        """These states are on the device for the time of a call; where they are afterwards is `meta`'s say, and else
        the setting's. Costs nothing where the states never move.

        After an error they go there, too, also if it is that they could not be reloaded. The ranks meet only after one
        that all of them have.

        Args:
            infix: of the metrics' names.
            include: None: all.
            meta: `is_offload_states`: False: they stay on the device after this call; True: they go to the host.
            alone: not all ranks are in this call, so that they cannot meet.
            known: what else the call itself may be told in `meta`, of `META_KEYS`.

        Raises:
            ValueError: another key in `meta`.
        """
        given = check_meta(meta, known)
        offload = bool(given.get(IS_OFFLOAD_STATES, self._automatic))
        if not offload and not self._moving:
            if not self._student.states.away():
                yield
                return
            alone = True  # a call without the others has moved them, who do not know, and so they come back
        self._moving |= not alone
        call, before_s = _Call(self, alone), self._waited_s
        try:
            with state_offload_manager(call, self._metrics, infix, offload, include=include):
                try:
                    yield
                except BaseException as error:
                    call.alone |= not _is_everybodys(error)
                    raise
        finally:
            name = f"time/{infix}/meeting"
            self._metrics[name] = self._metrics.get(name, 0.0) + self._waited_s - before_s

    def take_metrics(self) -> dict[str, float]:
        """What the calls since the last one measured: the numbers of `state_offload_manager`, and
        `time/<infix>/meeting`, how much of `onload` and `offload` this rank waited for the others.
        """
        metrics, self._metrics = self._metrics, {}
        return metrics

    def _end(self, moves: Moves, include: Sequence[str] | None, alone: bool) -> None:
        with self._met(_OFFLOADING, alone):
            moves.wait()
            self._give_back(include)

    def _give_back(self, include: Sequence[str] | None) -> None:
        self._empty_cache()
        if self._device.type == "cuda" and include is None:
            self._name_who_stays()

    def _empty_cache(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _name_who_stays(self) -> None:
        """All states have gone: say who has memory on the GPU all the same, again only if it becomes half as much more.

        Others who share the GPU miss it, and where it grows from step to step somebody keeps what he should not.
        """
        if self._student.states.allocated():  # a call has brought some back meanwhile
            return
        left = self.allocated_bytes() - self._staying()
        if left > max(_WORTH_NAMING, 1.5 * self._named):
            self._named = left
            found = "; ".join(holder.line() for holder in holders(self._device)[:_NAMED])
            text = "%.2f GiB too much stay allocated on %s while the states are away; who holds most there: %s"
            log.warning(text, left / GIB, self._device, found)

    @contextmanager
    def _met(self, phase: str, alone: bool) -> Iterator[None]:
        """The block fails on all ranks or on none.

        An error is explained before the others hear of it: whoever hears first ends the run. And they raise the same
        one, since any of them may be the first whom the driver hears.
        """
        self._moving |= not alone
        if self._ranks is None or alone:
            with self._diagnosed(phase):
                yield
            return
        with self._waiting():
            dist.barrier(self._ranks)
        problem: Exception | None = None
        try:
            with self._diagnosed(phase):
                yield
        except Exception as error:
            problem = error
        said: list[GkdError | None] = [None] * dist.get_world_size()
        with self._waiting():
            dist.all_gather_object(said, _for_others(problem), group=self._ranks)
        if problem is not None:
            raise problem
        for error_there in said:
            if error_there is not None:
                raise error_there

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self._waited_s += time.perf_counter() - began


class _Call:
    """The strategy of one call. Once this rank is apart from the others, its moves are its own: they may never come to
    a meeting again.
    """

    def __init__(self, held: OffloadController, alone: bool) -> None:
        self._held, self.alone = held, alone

    def offload_states(self, include: Sequence[str] | None = None, *, non_blocking: bool = False) -> Moves:
        return self._held.offload_states(include, non_blocking=non_blocking, alone=self.alone)

    def reload_states(self, include: Sequence[str] | None = None, *, non_blocking: bool = False) -> Moves:
        try:
            return self._held.reload_states(include, non_blocking=non_blocking, alone=self.alone)
        except BaseException:
            self.alone = True
            raise

    def allocated_bytes(self) -> int:
        return self._held.allocated_bytes()


def _for_others(problem: Exception | None) -> GkdError | None:
    """An error of this rank, as the others raise it."""
    if problem is None or isinstance(problem, GkdError):
        return problem
    text = f"the states of actor rank {dist.get_rank()} could not be moved: {type(problem).__name__}: {problem}"
    return ClusterError("\n".join([text, *traceback.format_exception(problem)]))


def _is_everybodys(error: BaseException) -> bool:
    """Return whether all ranks raise this error (`gkd.actor.common.agree`); a rank that breaks raises alone."""
    return isinstance(error, GkdError) and not isinstance(error, ClusterError)
