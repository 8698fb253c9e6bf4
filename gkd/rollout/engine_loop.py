"""The loop of one rollout engine while a stream is open: one thread steps it and does all else in between.

    other threads: call, post, generate, close          the loop's thread: run
        -> what is to be done, in order of arrival  ->  do it; one step; hand out what has finished; again

No engine call is ever made by two threads at a time, whatever is asked must wait for one step and not for a sequence,
and while nothing is being written the thread sleeps. No ray and no vLLM here.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from gkd.errors import ClusterError
from gkd.rollout.engine import Sampling
from gkd.types import Prompt, Rollout

T = TypeVar("T")


class Steppable(Protocol):
    """What the loop needs of `gkd.rollout.engine.RolloutEngine`."""

    @property
    def n_running(self) -> int: ...
    def add(self, owner: Hashable, prompts: Sequence[Prompt], sampling: Sampling, places: Sequence[int]) -> None: ...
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
    """

    def __init__(self, engine: Steppable, sampling: Sampling) -> None:
        self._engine, self._sampling = engine, sampling
        self._changed = threading.Condition()  # guards all below
        self._posted: deque[_Posted] = deque()
        self._guests: dict[Hashable, list[Rollout]] = {}  # what has finished for each `generate`
        self._state = "new"  # "new" | "running" | "ended"
        self._closing = False
        self._error: Exception | None = None

    def run(self) -> Iterator[list[Rollout]]:
        """Yield the samples of each prompt of the stream when the last of them is finished, until `close`.

        Raises:
            Exception: what a step, or something vital that was asked for, failed with. Whoever waits for something
                gets it, too.
        """
        with self._changed:
            if self._closing:
                return
            self._state = "running"
        unfinished: defaultdict[int, list[Rollout]] = defaultdict(list)
        try:
            while self._do_posted():
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

    def admit(self, prompts: Sequence[Prompt], places: Sequence[int]) -> None:
        """Give the stream more prompts; returns at once. One that the engine refuses ends the stream."""
        self._post(_Posted(lambda: self._engine.add(self, prompts, self._sampling, places), vital=True))

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

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling, places: Sequence[int]) -> Iterator[Rollout]:
        """As `RolloutEngine.generate`, beside the stream."""
        guest = object()
        n_left = len(prompts) * sampling.n
        with self._changed:
            self._guests[guest] = []
        try:
            self.call(lambda: self._engine.add(guest, prompts, sampling, places))
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
        """Drop what is not finished; returns when nobody but the caller uses the engine. Harmless when repeated."""
        with self._changed:
            self._closing = True
            if self._state == "new":  # the engine is still the caller's
                self._end()
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._state == "ended")

    @property
    def _over(self) -> bool:
        return self._closing or self._state == "ended"

    def _post(self, posted: _Posted) -> None:
        with self._changed:
            if self._over:
                raise self._error or _closed()
            self._posted.append(posted)
            self._changed.notify_all()

    def _do_posted(self) -> bool:
        """Sleep until there is something to do; do what has been posted by then. False: the stream is to end."""
        with self._changed:
            self._changed.wait_for(lambda: self._closing or self._posted or self._engine.n_running)
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
        with self._changed:
            try:
                for owner in (self, *self._guests):
                    self._engine.drop(owner)
                self._engine.settle()
            finally:
                self._state = "ended"
                for posted in self._posted:
                    posted.result.set_exception(self._error or _closed())
                self._posted.clear()
                self._changed.notify_all()


def _closed() -> ClusterError:
    return ClusterError("the rollout stream is closed")
