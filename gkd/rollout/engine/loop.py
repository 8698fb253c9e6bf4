"""Event loop of one rollout engine while a stream is open: a single thread makes all engine calls.

    other threads: admit, call, generate, close         loop thread: run
        -> queue of calls, first in, first out      ->  execute them
        -> backlog: prompts of all jobs             ->  submit the next ones if there is room
                                                        one step; return the chunks that are due; repeat

A call waits for at most one step, not for a sequence to finish. The thread sleeps while the engine has no work; before,
it returns all finished sequences. The backlog is kept here because the engine's own queue is first come, first served:
a `generate` call concurrent with the stream waits for a free slot, but not for the backlog. No ray and no vLLM here.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from gkd.errors import ClusterError
from gkd.log import get_logger
from gkd.rollout.messages import Job, Sampling
from gkd.types import Prompt, Rollout

if TYPE_CHECKING:
    from gkd.rollout.vllm.engine import RolloutEngine

log = get_logger("engine_loop")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Call:
    function: Callable[[], Any]
    fatal: bool = False  # an error ends the stream
    result: Future[Any] = field(default_factory=Future)


class EngineLoop:
    """One stream on one engine. All methods except `run` are thread-safe.

    Args:
        engine: used exclusively by the loop from the first step of `run` until `close` has returned.
        max_running: no prompt starts while the engine generates this many sequences of any owner; at least 1. The
            samples of a prompt start together, so the engine may then have up to n - 1 more. Sequences that wait for
            their environments take no place, up to as many again.
        diagnosed: context manager around engine steps, which explains out-of-memory errors.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        max_running: int,
        chunks: Coalescer,
        diagnosed: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._engine = engine
        self._max_running = max_running
        self._chunks = chunks
        self._diagnosed = diagnosed
        self._changed = threading.Condition()  # guards all attributes below
        self._calls: deque[_Call] = deque()
        self._backlog: deque[tuple[Job, Prompt, int]] = deque()  # prompts not yet submitted, each with its prompt index
        self._finished: dict[Hashable, list[Rollout]] = {}  # owner, one per running `generate` -> finished rollouts
        self._state = "new"  # "new" | "running" | "ending" | "ended"; the last two accept no calls
        self._closing = False
        self._error: Exception | None = None  # the first one
        self._cleanup_failed = False  # `_error` was raised while ending the stream, not before
        self._running: dict[int, tuple[Job, int]] = {}  # id -> job, and its sequences in the engine; of the loop thread

    def run(self) -> Iterator[tuple[int, int, list[Rollout]]]:
        """Yield (job's id, data-parallel group, finished sequences), as `Coalescer.due` does, until `close`.

        Raises:
            Exception: the first error of a step, a refused prompt, a fatal call or the clean-up. All waiting callers
                get the same error.
        """
        with self._changed:
            if self._closing:
                return
            self._state = "running"
        try:
            while self._execute_calls():
                with self._diagnosed():
                    if self._engine.has_weights:
                        self._start_prompts()
                        if self._engine.n_running:
                            self._engine.step()
                yield from self._due_chunks()
                self._distribute_finished()
        except Exception as error:
            self._error = error
            raise
        finally:
            self._end()

    def admit(self, job: Job, prompts: Sequence[Prompt], prompt_indices: Sequence[int], *, first: bool = False) -> None:
        """Append prompts to the backlog; returns at once. They start in this order, each when there is room.

        A prompt that the engine refuses ends the stream. With `first` they go before the prompts that wait. Raises
        ClusterError: the stream is closed. If it failed, its error instead.
        """
        rows = [(job, prompt, index) for prompt, index in zip(prompts, prompt_indices, strict=True)]
        with self._changed:
            self._check_open()
            if first:
                self._backlog.extendleft(reversed(rows))
            else:
                self._backlog.extend(rows)
            self._changed.notify_all()

    def waiting(self, job_id: int) -> list[int]:
        """Return the prompt indices of a job's prompts that have not started."""
        with self._changed:
            return [index for job, _, index in self._backlog if job.id == job_id]

    def call(self, function: Callable[[], T]) -> T:
        """Execute `function` in the loop thread between two steps; wait for its result or raise its error.

        Raises:
            ClusterError: the stream is closed. If it failed, its error instead.
        """
        call = _Call(function)
        self._enqueue(call)
        result: T = call.result.result()
        return result

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, prompt_indices: Sequence[int]
    ) -> Iterator[Rollout]:
        """Do the same as `RolloutEngine.generate`, concurrently with the stream."""
        owner = object()
        n_left = len(prompts) * sampling.n
        with self._changed:
            self._finished[owner] = []
        try:
            self.call(lambda: self._engine.add(owner, prompts, sampling, prompt_indices))
            while n_left:
                with self._changed:
                    self._changed.wait_for(lambda: self._finished[owner] or self._state == "ended")
                    finished = self._finished[owner]
                    self._finished[owner] = []
                if not finished:
                    raise self._error or _closed()
                n_left -= len(finished)
                yield from finished
        finally:
            with self._changed:
                if not self._over:  # otherwise `_end` aborts, or has aborted, the remaining sequences
                    self._enqueue(_Call(lambda: self._remove_owner(owner), fatal=True))

    def close(self) -> None:
        """Abort unfinished sequences; returns when the engine is free for the caller. Idempotent.

        Raises:
            Exception: the clean-up failed. Not raised if the stream had failed before.
        """
        with self._changed:
            self._closing = True
            never_run = self._state == "new"  # the loop thread has not used the engine
            if never_run:
                self._state = "ending"
            self._changed.notify_all()
        if never_run:
            self._end()
        with self._changed:
            self._changed.wait_for(lambda: self._state == "ended")
            if self._cleanup_failed and self._error is not None:
                raise self._error

    @property
    def _is_due(self) -> bool:
        """Return whether the engine has work. After a failed weight sync it has none until another one succeeds."""
        return bool(self._backlog or self._engine.n_running) and self._engine.has_weights

    @property
    def n_pending_calls(self) -> int:
        """Number of calls that wait for the end of a step."""
        return len(self._calls)

    @property
    def _over(self) -> bool:
        return self._closing or self._state in ("ending", "ended")

    def _check_open(self) -> None:
        if self._over:
            raise self._error or _closed()

    def _enqueue(self, call: _Call) -> None:
        with self._changed:
            self._check_open()
            self._calls.append(call)
            self._changed.notify_all()

    def _execute_calls(self) -> bool:
        """Sleep until there is work, then execute the calls queued by then. Return False if the stream is to end."""
        with self._changed:
            self._changed.wait_for(lambda: self._closing or self._calls or self._is_due)
            n_calls = len(self._calls)
        for _ in range(n_calls):
            call = self._calls.popleft()
            try:
                result = call.function()
            except Exception as error:
                call.result.set_exception(error)
                if call.fatal:
                    raise
            else:
                call.result.set_result(result)
        return not self._closing

    def _start_prompts(self) -> None:
        engine = self._engine
        most = self._max_running
        while self._backlog and engine.n_generating < most and engine.n_running < 2 * most:
            with self._changed:
                job, prompt, prompt_index = self._backlog.popleft()
            self._engine.add(job.id, [prompt], job.sampling, [prompt_index])
            self._running[job.id] = job, self._running.get(job.id, (job, 0))[1] + job.sampling.n

    def _due_chunks(self) -> Iterator[tuple[int, int, list[Rollout]]]:
        now_s = time.monotonic()
        for job, n_left in list(self._running.values()):
            finished = self._engine.pop_finished(job.id)
            for rollout in finished:
                self._chunks.add(job, rollout, now_s)
            if len(finished) == n_left:
                del self._running[job.id]
            elif finished:
                self._running[job.id] = job, n_left - len(finished)
        yield from self._chunks.due(now_s, flush=not self._running and not self._backlog)

    def _distribute_finished(self) -> None:
        with self._changed:
            for owner, finished in self._finished.items():
                finished += self._engine.pop_finished(owner)
            self._changed.notify_all()

    def _remove_owner(self, owner: Hashable) -> None:
        self._engine.abort(owner)
        with self._changed:
            del self._finished[owner]

    def _end(self) -> None:
        """Fail the queued calls and abort all sequences, then wait for the device.

        The device may take long; only `close` and running `generate` calls wait for it.
        """
        with self._changed:
            self._state = "ending"
            while self._calls:
                self._calls.popleft().result.set_exception(self._error or _closed())
            owners = (*self._running, *self._finished)
        try:
            for owner in owners:
                self._engine.abort(owner)
            self._engine.synchronize()
        except Exception as error:
            if self._error is None:
                self._error = error
                self._cleanup_failed = True
                raise
            log.error("clean-up of a failed rollout stream (%s) failed, too: %s", self._error, error, exc_info=error)
        finally:
            with self._changed:
                self._state = "ended"
                self._changed.notify_all()


def _closed() -> ClusterError:
    return ClusterError("the rollout stream is closed")


_LATE_SHARE = 1 / 8  # share of the usual time that a late chunk waits: few more chunks, even if most sequences are late


@dataclass(slots=True)
class _Growing:
    due_s: float
    rollouts: list[Rollout] = field(default_factory=list)


class Coalescer:
    """Hold finished sequences until their chunk is full or has waited long enough.

    Args:
        n_groups: data-parallel groups; a prompt's index modulo this is the group that scores it.
        size: sequences of a full chunk.
        late_age: a sequence over which the weights have changed this many times, or more often, waits for a shorter
            time, because a step may wait for it; 0: none does.
        whole: sequences wait until all of their prompt have finished; `size` is a multiple of their number.
    """

    def __init__(self, n_groups: int, size: int, late_age: int = 0, *, whole: bool = False) -> None:
        self._n_groups = n_groups
        self._size = size
        self._late_age = late_age
        self._whole = whole
        self._growing: dict[tuple[int, int], _Growing] = {}  # (job id, data-parallel group) -> chunk
        self._parts: dict[tuple[int, int], list[Rollout]] = {}  # (job id, prompt index) -> its finished sequences

    def add(self, job: Job, rollout: Rollout, now_s: float) -> None:
        prompt = job.id, rollout.sample_index // job.sampling.n
        part = self._parts.setdefault(prompt, [])
        part.append(rollout)
        if self._whole and len(part) < job.sampling.n:
            return
        del self._parts[prompt]
        key = job.id, prompt[1] % self._n_groups
        growing = self._growing.get(key)
        if growing is None:
            growing = self._growing[key] = _Growing(now_s + job.linger_s)
        if self._late_age and any(one.version_span >= self._late_age for one in part):
            growing.due_s = min(growing.due_s, now_s + _LATE_SHARE * job.linger_s)
        growing.rollouts += part

    def due(self, now_s: float, *, flush: bool) -> Iterator[tuple[int, int, list[Rollout]]]:
        """Yield (job's id, group, sequences) of the chunks that leave now; with `flush` of all."""
        for (job, group), growing in list(self._growing.items()):
            rest = growing.rollouts
            while len(rest) >= self._size:
                yield job, group, rest[: self._size]
                rest = rest[self._size :]
            if rest and (flush or now_s >= growing.due_s):
                yield job, group, rest
                rest = []
            if rest:
                growing.rollouts = rest
            else:
                del self._growing[job, group]
