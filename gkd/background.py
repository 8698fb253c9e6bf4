"""Work beside the loop: one thread that does what it is given, in order. Floor 0."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, Generic, Protocol, TypeVar

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Result(Protocol[T_co]):
    """What a job returns or raises, once it is done."""

    def result(self) -> T_co: ...


class Background:
    """One daemon thread: an interrupted run need not wait for it, as it would for a pool's of the standard library."""

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        threading.Thread(target=self._work, name=name, daemon=True).start()

    def start(self, job: Callable[[], T]) -> Result[T]:
        """Do it after all that was given before; returns at once."""
        future: Future[T] = Future()
        self._jobs.put((job, future))
        return future

    def close(self) -> None:
        """The thread ends after what it was given; does not wait for it."""
        self._jobs.put(None)

    def _work(self) -> None:
        while (item := self._jobs.get()) is not None:
            job, future = item
            try:
                future.set_result(job())
            except BaseException as error:  # whatever it is, whoever asks for the result gets it
                future.set_exception(error)


class Foreground(Generic[T]):
    """A job that is done when its result is asked for, once, by who asks."""

    def __init__(self, job: Callable[[], T]) -> None:
        self._job = job
        self._done: list[T] = []

    def result(self) -> T:
        if not self._done:
            self._done.append(self._job())
        return self._done[0]
