"""The loop of one rollout engine while a stream is open: one thread steps it and does all else in between.

    other threads: admit, call, generate, close         the loop's thread: run
        -> what is to be done, in order of arrival  ->  do it
        -> the backlog: prompts of the stream       ->  begin the next ones, if there is room
                                                        one step; hand out what has finished; again

No engine call is ever made by two threads at a time, whatever is asked must wait for one step and not for a sequence,
and while nothing is being written the thread sleeps. The backlog is here and not in the engine, which answers first
come, first served: so a `generate` beside the stream waits for room and not for the backlog. No ray and no vLLM here.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from gkd.errors import ClusterError
from gkd.log import get_logger
from gkd.rollout.sampling import Sampling
from gkd.types import Prompt, Rollout

log = get_logger("engine_loop")
T = TypeVar("T")


class Steppable(Protocol):
    """What the loop needs of `gkd.rollout.engine.RolloutEngine`."""

    @property
    def n_running(self) -> int: ...
    def add(
        self, owner: Hashable, prompts: Sequence[Prompt], sampling: Sampling, prompt_indices: Sequence[int]
    ) -> None: ...
    def step(self) -> None: ...
    def take(self, owner: Hashable) -> list[Rollout]: ...
    def drop(self, owner: Hashable) -> None: ...
    def settle(self) -> None: ...


@dataclass(frozen=True, slots=True)
class _Posted:
    what: Callable[[], Any]
    vital: bool  # the stream cannot go on if it fails
    result: Future[Any] = field(default_factory=Future)


class EngineLoop:
    """One stream of one engine. Everything but `run` may be called from any thread.

    Args:
        engine: nobody else uses it from `run`'s first step until `close` has returned.
        sampling: of the stream's own prompts.
        max_running: the stream begins no prompt while the engine has this many sequences, at least 1, whoever's they
            are. A prompt's samples begin together, so it may then have sampling.n - 1 more.
    """

    def __init__(
        self,
        engine: Steppable,
        sampling: Sampling,
        max_running: int,
        explained: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._engine, self._sampling, self._max_running = engine, sampling, max_running
        self._explained = explained
        self._changed = threading.Condition()  # guards all below
        self._posted: deque[_Posted] = deque()
        self._backlog: deque[tuple[Prompt, int]] = deque()  # with their prompt indices; the engine has not got them yet
        self._guests: dict[Hashable, list[Rollout]] = {}  # what has finished for each `generate`
        self._state = "new"  # "new" | "running" | "ending" | "ended"; nothing is posted in the last two
        self._closing = False
        self._error: Exception | None = None  # the first one
        self._end_failed = False  # it was the handing back that failed, and nothing before it

    def run(self) -> Iterator[list[Rollout]]:
        """Yield the samples of each prompt of the stream when the last of them is finished, until `close`.

        Raises:
            Exception: what a step, a refused prompt, something vital that was asked for, or the end itself failed
                with; the first of them. Whoever waits for something gets it, too.
        """
        with self._changed:
            if self._closing:
                return
            self._state = "running"
        unfinished: defaultdict[int, list[Rollout]] = defaultdict(list)
        try:
            while self._do_posted():
                with self._explained():
                    self._begin_prompts()
                    if self._engine.n_running:
                        self._engine.step()
                for rollout in self._engine.take(self):
                    place = rollout.sample_index // self._sampling.n
                    unfinished[place].append(rollout)
                    if len(unfinished[place]) == self._sampling.n:
                        yield sorted(unfinished.pop(place), key=lambda r: r.sample_index)
                self._serve_guests()
        except Exception as error:
            self._error = error
            raise
        finally:
            self._end()

    def admit(self, prompts: Sequence[Prompt], prompt_indices: Sequence[int]) -> None:
        """Give the stream more prompts; returns at once. They begin in this order, each when there is room for it. One
        that the engine refuses when its turn comes ends the stream.

        Raises:
            ClusterError: the stream is closed. If it failed: what it failed with.
        """
        placed = list(zip(prompts, prompt_indices, strict=True))
        with self._changed:
            self._check_open()
            self._backlog.extend(placed)
            self._changed.notify_all()

    def call(self, what: Callable[[], T], *, vital: bool = False) -> T:
        """Have the loop do something with the engine between two steps; waits for its result, or raises its error.

        Args:
            vital: the engine is not to be used any more if it fails: the stream ends.

        Raises:
            ClusterError: the stream is closed. If it failed: what it failed with.
        """
        posted = _Posted(what, vital)
        self._post(posted)
        result: T = posted.result.result()
        return result

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, prompt_indices: Sequence[int]
    ) -> Iterator[Rollout]:
        """As `RolloutEngine.generate`, beside the stream."""
        guest = object()
        n_left = len(prompts) * sampling.n
        with self._changed:
            self._guests[guest] = []
        try:
            self.call(lambda: self._engine.add(guest, prompts, sampling, prompt_indices))
            while n_left:
                with self._changed:
                    self._changed.wait_for(lambda: self._guests[guest] or self._state == "ended")
                    finished, self._guests[guest] = self._guests[guest], []
                if not finished:
                    raise self._error or _closed()
                n_left -= len(finished)
                yield from finished
        finally:
            with self._changed:
                if not self._over:  # else its end drops, or has dropped, what the guest left
                    self._post(_Posted(lambda: self._leave(guest), vital=True))

    def close(self) -> None:
        """Drop what is not finished; returns when nobody but the caller uses the engine. Harmless when repeated.

        Raises:
            Exception: what the engine failed with when it was handed back. Nothing if the stream had failed before.
        """
        with self._changed:
            self._closing = True
            never_run = self._state == "new"  # the engine is still the caller's
            if never_run:
                self._state = "ending"
            self._changed.notify_all()
        if never_run:
            self._end()
        with self._changed:
            self._changed.wait_for(lambda: self._state == "ended")
            if self._end_failed and self._error is not None:
                raise self._error

    @property
    def _over(self) -> bool:
        return self._closing or self._state in ("ending", "ended")

    def _check_open(self) -> None:
        if self._over:
            raise self._error or _closed()

    def _post(self, posted: _Posted) -> None:
        with self._changed:
            self._check_open()
            self._posted.append(posted)
            self._changed.notify_all()

    def _do_posted(self) -> bool:
        """Sleep until there is something to do; do what has been posted by then. False: the stream is to end."""
        with self._changed:
            self._changed.wait_for(lambda: self._closing or self._posted or self._backlog or self._engine.n_running)
            n_posted = len(self._posted)
        for _ in range(n_posted):
            posted = self._posted.popleft()
            try:
                done = posted.what()
            except Exception as error:
                posted.result.set_exception(error)
                if posted.vital:
                    raise
            else:
                posted.result.set_result(done)
        return not self._closing

    def _begin_prompts(self) -> None:
        while self._backlog and self._engine.n_running < self._max_running:
            prompt, place = self._backlog.popleft()
            self._engine.add(self, [prompt], self._sampling, [place])

    def _serve_guests(self) -> None:
        with self._changed:
            for guest, finished in self._guests.items():
                finished += self._engine.take(guest)
            self._changed.notify_all()

    def _leave(self, guest: Hashable) -> None:
        self._engine.drop(guest)
        with self._changed:
            del self._guests[guest]

    def _end(self) -> None:
        """Leave nothing in the engine and say so. The device may take its time: nobody waits for it but `close` and
        the guests.
        """
        with self._changed:
            self._state = "ending"
            while self._posted:
                self._posted.popleft().result.set_exception(self._error or _closed())
            owners = (self, *self._guests)
        try:
            for owner in owners:
                self._engine.drop(owner)
            self._engine.settle()
        except Exception as error:
            if self._error is None:
                self._error, self._end_failed = error, True
                raise
            log.error("the stream had failed (%s); then its end did, too: %s", self._error, error, exc_info=error)
        finally:
            with self._changed:
                self._state = "ended"
                self._changed.notify_all()


def _closed() -> ClusterError:
    return ClusterError("the rollout stream is closed")
