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
        self._closed = False
        threading.Thread(target=self._work, name=name, daemon=True).start()

    def start(self, job: Callable[[], T]) -> Result[T]:
        """Do it after all that was given before; returns at once."""
        future: Future[T] = Future()
        self._jobs.put((job, future))
        return future

    def close(self) -> None:
        """Begin nothing more; does not wait for the job that is being done. What was not begun is cancelled."""
        self._closed = True
        self._jobs.put(None)

    def _work(self) -> None:
        while (item := self._jobs.get()) is not None:
            job, future = item
            if self._closed:
                future.cancel()
                continue
            try:
                future.set_result(job())
            except BaseException as error:  # whatever it is, whoever asks for the result gets it
                future.set_exception(error)
                # Ray ends threads that call it during its shutdown by SystemExit: nothing may be begun after that.
                self._closed = self._closed or not isinstance(error, Exception)


class Foreground(Generic[T]):
    """A job that is done when its result is asked for, once, by who asks."""

    def __init__(self, job: Callable[[], T]) -> None:
        self._job = job
        self._done: list[T] = []

    def result(self) -> T:
        if not self._done:
            self._done.append(self._job())
        return self._done[0]
