"""Run jobs in one background thread, in order."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, Generic, Protocol, TypeVar

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Result(Protocol[T_co]):
    """The value that a job returns, or the error that it raises, once it is done."""

    def result(self) -> T_co: ...


class Background:
    """One daemon thread, which unlike a `ThreadPoolExecutor` does not delay the exit of an interrupted run."""

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        self._closed = False
        threading.Thread(target=self._work, name=name, daemon=True).start()

    def start(self, job: Callable[[], T]) -> Result[T]:
        """Queue a job; returns at once."""
        future: Future[T] = Future()
        self._jobs.put((job, future))
        return future

    def close(self) -> None:
        """Cancel the jobs that have not started; does not wait for the running one."""
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
            except BaseException as error:  # `result` raises it
                future.set_exception(error)
                # During its shutdown Ray ends threads that call it with SystemExit: no further job may start.
                self._closed = self._closed or not isinstance(error, Exception)


class Foreground(Generic[T]):
    """A job that runs in the first call of `result`."""

    def __init__(self, job: Callable[[], T]) -> None:
        self._job = job
        self._done: list[T] = []

    def result(self) -> T:
        if not self._done:
            self._done.append(self._job())
        return self._done[0]
