"""Keep what the driver is doing now, as nested activities of its main thread: "step 12/120", "eval", "train".

As with logging there is one instance per process, since code anywhere in the driver reports to it. Other threads of the
driver work ahead, so their reports are ignored.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Activity:
    """One level.

    Args:
        since_s: start, on the clock of `Activities`.
        done: finished parts of `total`; total 0: unknown.
    """

    name: str
    since_s: float
    done: int = 0
    total: int = 0

    def __str__(self) -> str:
        if self.total > 1:
            return f"{self.name} {self.done}/{self.total}"
        return f"{self.name} {self.done}" if self.done and not self.total else self.name


class Activities:
    """The nested activities of the main thread; any thread may read them.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._now: tuple[Activity, ...] = ()  # replaced as a whole, so readers need no lock

    @property
    def now(self) -> tuple[Activity, ...]:
        """Return the current activities, outermost first."""
        return self._now

    @contextmanager
    def during(self, name: str, total: int = 0) -> Iterator[None]:
        """Enter an activity until the end of the block.

        Args:
            total: number of its parts, for `done`.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        outer = self._now
        self._now = (*outer, Activity(name, self.clock(), 0, total))
        try:
            yield
        finally:
            self._now = outer

    def done(self, n: int) -> None:
        """Set the number of finished parts of the innermost activity."""
        if self._now and threading.current_thread() is threading.main_thread():
            self._now = (*self._now[:-1], replace(self._now[-1], done=n))


activities = Activities()
