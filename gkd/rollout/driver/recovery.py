"""The engines of the rollout pool by slot: which can be called, and the restart of one that died or hangs.

    up        in `up`: can be called
    down      a thread kills what is left of it, starts it in its slot, and gives it the weights that the others hold
    failed    more often than rollout.max_restarts: every later call here raises EngineFailed

If a call on an engine fails, the caller reports it with `lost`, and repeats the work on the engines that are up. A hung
engine is killed, so its calls fail, too. A restarted engine is a new handle.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from gkd.config.schema_rollout import RolloutConfig
from gkd.errors import EngineFailed, GkdError, RankFailed, RankTimeout, SenderFailed, WeightSyncError
from gkd.log import get_logger
from gkd.types import EngineRestarts

if TYPE_CHECKING:
    from gkd.rollout.driver.restart import EngineSlots

log = get_logger("recovery")
T = TypeVar("T")


_CLOSE_S = 10.0  # a restart whose process is killed fails within a second

# States of a slot. unsynced: the process is ready, but no engine has a complete version; the next sync includes it.
_UP = "up"
_DOWN = "down"
_UNSYNCED = "unsynced"


@dataclass(slots=True)
class _Slot:
    worker: Any
    state: str = _UP
    n_restarts: int = 0  # restart attempts, including failed ones
    cause: GkdError | None = None  # error of the last failure
    down_s: float = 0.0  # clock at the last failure
    n_prompts: int = 0  # prompts lost with the process, which are generated again
    restart: threading.Thread | None = None  # thread of the restart in progress


class Engines:
    """The engines by slot. `workers` are their Ray handles, which are all up. Thread-safe."""

    def __init__(self, workers: Sequence[Any], config: RolloutConfig) -> None:
        self._max_restarts = config.max_restarts
        self._slots = [_Slot(worker) for worker in workers]
        self._changed = threading.Condition(threading.RLock())  # guards all attributes
        self._start: EngineSlots | None = None
        self._restore: Callable[[int, Any], int | None] | None = None
        self._failure: GkdError | None = None
        self._syncing = self._held = self._closed = False
        self._callbacks: list[Callable[[], None]] = []
        self._done = EngineRestarts()

    def recover_with(self, slots: EngineSlots, restore: Callable[[int, Any], int | None]) -> None:
        """Restart engines from now on. Before this, and with rollout.max_restarts: 0, a failure is raised.

        Args:
            restore: give engine i, a new process with this handle, the weights last pushed; return their version, or
                None if no push has succeeded since one failed; then the engine waits for the next `sync`.
        """
        self._start = slots
        self._restore = restore

    def on_up(self, callback: Callable[[], None]) -> None:
        """Call this, in any thread, after an engine has come up, or has failed for good."""
        with self._changed:
            self._callbacks.append(callback)

    def up(self) -> dict[int, Any]:
        """Return index -> handle of the engines that can be called."""
        with self._changed:
            return {i: slot.worker for i, slot in enumerate(self._slots) if slot.state == _UP}

    def wait_up(self, timeout_s: float) -> dict[int, Any]:
        """Return `up` when it is not empty.

        Raises:
            RankTimeout: no engine is up in time.
            GkdError: see `check`.
        """
        with self._changed:
            if not self.up():
                self._restart_waiting()  # even after `hold`: the caller needs an engine
            if not self._changed.wait_for(lambda: self._failure or self.up(), timeout_s):
                raise RankTimeout(f"no rollout engine was ready within {timeout_s:g} s")
            self.check()
            return self.up()

    def check(self) -> None:
        """Raise the error that ends the run, if an engine failed for good.

        Raises:
            EngineFailed: an engine failed once more than rollout.max_restarts.
            GkdError: a restart failed for a reason that would come again.
        """
        with self._changed:
            if self._failure is not None:
                raise self._failure

    @property
    def has_failed(self) -> bool:
        """Return whether `check` raises."""
        return self._failure is not None

    def lost(self, index: int, worker: Any, cause: GkdError, n_prompts: int = 0) -> None:
        """Report that a process failed, and start the engine again. Only the first report of a process has an effect.

        Args:
            n_prompts: prompts that have to be generated again; added in each report.

        Raises:
            GkdError: `cause`, if engines are not restarted.
        """
        with self._changed:
            slot = self._slots[index]
            slot.n_prompts += n_prompts
            self._done = self._done.plus(prompts=n_prompts)
            if slot.worker != worker or slot.state == _DOWN or self._closed:
                return
            if self._start is None or self._max_restarts == 0:
                raise cause
            slot.state = _DOWN
            slot.down_s = time.monotonic()
            if self._may_restart(index, cause) and not self._held:
                self._restart(index)
            self._changed.notify_all()

    def sync(self, push: Callable[[Mapping[int, Any]], T], timeout_s: float) -> T | None:
        """Send weights to all engines that are up with `push`; repeat it for the others when engines fail meanwhile.

        No restarted engine joins them meanwhile. If engines failed for good there may be none left: the error is
        raised when rollouts are needed, so that a step that is trained is finished before.

        Args:
            push: send the weights to these engines: index -> handle. Raises WeightSyncError: it failed on `lost`.
            timeout_s: of the wait for an engine, if none is up.

        Returns:
            The result of `push`, or None if no engine is left.

        Raises:
            RankTimeout: no engine was up in time.
            WeightSyncError: the transfer failed, and no engine is the reason.
        """
        while members := self._begin_sync(timeout_s):
            try:
                result = push(members)
                with self._changed:
                    for index, worker in members.items():
                        if self._slots[index].worker == worker and self._slots[index].state == _UNSYNCED:
                            self._slots[index].state = _UP
                self._announce()
                return result
            except WeightSyncError as error:
                if not error.lost:
                    raise
                for index, cause in error.lost.items():
                    self.lost(index, members[index], cause)
            finally:
                self._end_sync()
        return None

    def hold(self) -> None:
        """Let running restarts finish, and start none until `release`: another pool uses the GPUs."""
        with self._changed:
            self._held = True
            self._changed.wait_for(lambda: self._failure or not any(slot.restart for slot in self._slots))

    def release(self) -> None:
        """Allow restarts again."""
        with self._changed:
            self._held = False
            self._restart_waiting()

    def take_restarts(self) -> EngineRestarts:
        """Return and reset the counters."""
        with self._changed:
            done = self._done
            self._done = EngineRestarts()
            return done

    def close(self) -> None:
        """Start no more processes, and end those that are being started. Call it before the cluster is closed.

        Ray ends this process at once, without any clean-up, if a thread calls it while it stops. So the threads of
        restarts are waited for.
        """
        with self._changed:
            self._closed = True
            threads = {i: slot.restart for i, slot in enumerate(self._slots) if slot.restart is not None}
            self._changed.notify_all()
        if self._start is not None:
            self._start.close(threads.keys())
        deadline = time.monotonic() + _CLOSE_S
        for thread in threads.values():
            thread.join(max(0.0, deadline - time.monotonic()))

    def _begin_sync(self, timeout_s: float) -> dict[int, Any]:
        """Wait until no other sync runs; return the engines that it has to reach, none if none is left."""

        def members() -> dict[int, Any]:
            return {i: slot.worker for i, slot in enumerate(self._slots) if slot.state != _DOWN}

        with self._changed:
            if not members():
                self._restart_waiting()  # even while another pool has the GPUs: that pool waits for this sync
            if not self._changed.wait_for(lambda: not self._syncing and (members() or self._failure), timeout_s):
                raise RankTimeout(f"no rollout engine was ready within {timeout_s:g} s")
            self._syncing = True
            engines = members()
            if not engines:
                self._end_sync()
            return engines

    def _end_sync(self) -> None:
        with self._changed:
            self._syncing = False
            self._changed.notify_all()

    def _may_restart(self, index: int, cause: GkdError) -> bool:
        """Return whether a restart is left; otherwise record the failure that ends the run."""
        assert self._start is not None
        name = f"rollout engine {index} ({self._start.card(index)})"
        slot = self._slots[index]
        error = fatal_error(name, cause, slot.cause, slot.n_restarts, self._max_restarts)
        slot.cause = cause
        if error is None:
            log.warning("%s is lost and will be started again: %s", name, str(cause))
            return True
        self._failure = error
        self._changed.notify_all()
        threading.Thread(target=self._announce, name="engine failed", daemon=True).start()  # the caller may hold locks
        return False

    def _restart_waiting(self) -> None:
        for index, slot in enumerate(self._slots):
            if slot.state == _DOWN and self._failure is None:
                self._restart(index)

    def _restart(self, index: int) -> None:
        slot = self._slots[index]
        if slot.restart is None and not self._closed:
            slot.restart = threading.Thread(target=self._recover, args=(index,), name=f"restart {index}", daemon=True)
            slot.restart.start()

    def _recover(self, index: int) -> None:
        """Start an engine until it is up or has failed too often. Runs in its own thread."""
        assert self._start is not None
        slot = self._slots[index]
        try:
            while True:
                with self._changed:
                    if self._closed:
                        return
                    slot.n_restarts += 1
                try:
                    self._join(index, self._start.start(index, slot.n_restarts))
                    return
                except GkdError as error:
                    with self._changed:
                        if self._closed or not self._may_restart(index, error):
                            return
        except Exception as error:  # a bug: the thread that waits for this engine raises it
            with self._changed:
                if not self._closed:
                    self._failure = RankFailed(f"restart of rollout engine {index}: {type(error).__name__}: {error}")
        finally:
            with self._changed:
                if slot.restart is threading.current_thread():  # otherwise the engine has come up, and died again
                    slot.restart = None
                self._changed.notify_all()
            self._announce()

    def _announce(self) -> None:
        """Call the callbacks; no lock of this object is held."""
        if self._closed:  # they call the engines, and Ray may have stopped
            return
        for callback in self._callbacks:
            callback()

    def _join(self, index: int, worker: Any) -> None:
        """Give a new process the current weights; then it is up."""
        assert self._start is not None and self._restore is not None
        slot = self._slots[index]
        with self._changed:
            self._changed.wait_for(lambda: not self._syncing or self._closed)
            if self._closed:
                return
            self._syncing = True
        try:
            version = self._restore(index, worker)
            with self._changed:
                slot.worker = worker
                slot.state = _UNSYNCED if version is None else _UP
                slot.restart = None
                took_s = time.monotonic() - slot.down_s
                self._done = self._done.plus(restarts=1, seconds=took_s)
                n_prompts = slot.n_prompts
                slot.n_prompts = 0
        finally:
            self._end_sync()
        log.warning(
            "rollout engine %d (%s) is up again after %.1f s, version %s; prompts to regenerate: %d; restart %d of %d",
            index, self._start.card(index), took_s, version, n_prompts, slot.n_restarts, self._max_restarts,
        )  # fmt: skip


# Retryable. Other errors (settings, memory) would recur.
_RECOVERABLE = (RankFailed, RankTimeout, WeightSyncError)
# Errors of the input, the model or the code. Errors of memory, devices and connections are others.
_LASTING = {
    "AssertionError",
    "AttributeError",
    "ImportError",
    "KeyError",
    "NotImplementedError",
    "TypeError",
    "ValueError",
}


def fatal_error(
    engine: str, cause: GkdError, before: GkdError | None, n_restarts: int, max_restarts: int
) -> GkdError | None:
    """Return the error that ends the run, or None if the engine may be started again.

    Args:
        engine: its name with host and GPU.
        before: cause of the failure before. If a new process raises the same error, so will the next one.
        n_restarts: of this engine so far, also in vain.
    """
    if not isinstance(cause, _RECOVERABLE) or isinstance(cause, SenderFailed):
        return cause
    kind = raised(cause).partition(":")[0].rpartition(".")[2]
    if kind in _LASTING or raised(cause) != "" and raised(cause) == raised(before):
        return EngineFailed(f"{engine} would fail again in a new process: {cause}. Fix: correct this error, and resume")
    if n_restarts < max_restarts:
        return None
    return EngineFailed(
        f"{engine} failed {n_restarts + 1} times (rollout.max_restarts = {max_restarts}); the last time: {cause}. "
        "Fix: correct this error or, if the hardware is the cause, take it out of the rollout pool, and resume"
    )


def raised(cause: GkdError | None) -> str:
    """Return the error that a process raised, in one line; empty if it died or hung."""
    return cause.raised if isinstance(cause, RankFailed) else ""
