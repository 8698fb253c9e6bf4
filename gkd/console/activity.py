"""Keep what the driver is doing now, as nested activities of its main thread: "step 12/120", "eval", "train".

As with logging there is one instance per process, since code anywhere in the driver reports to it. Other threads of the
driver work ahead, so their reports are ignored.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import NamedTuple


class Activity(NamedTuple):
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

    Attributes:
        now: the current activities, outermost first; replaced as a whole, so readers need no lock.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.now: tuple[Activity, ...] = ()

    def during(self, name: str, total: int = 0) -> During:
        """Return a context manager that enters an activity for its block.

        Args:
            total: number of its parts, for `done`.
        """
        return During(self, name, total)

    def done(self, n: int) -> None:
        """Set the number of finished parts of the innermost activity."""
        if self.now and threading.get_ident() == _MAIN:
            name, since_s, _, total = self.now[-1]
            self.now = (*self.now[:-1], Activity(name, since_s, n, total))


class During:
    """One activity; a class, since steps of a second enter dozens of them."""

    __slots__ = ("_activities", "_name", "_outer", "_total")

    def __init__(self, activities: Activities, name: str, total: int) -> None:
        self._activities, self._name, self._total = activities, name, total
        self._outer: tuple[Activity, ...] | None = None  # None: another thread's, which is ignored

    def __enter__(self) -> None:
        if threading.get_ident() == _MAIN:
            activities = self._activities
            self._outer = activities.now
            activities.now = (*self._outer, Activity(self._name, activities.clock(), 0, self._total))

    def __exit__(self, *_: object) -> None:
        if self._outer is not None:
            self._activities.now = self._outer


_MAIN = threading.main_thread().ident
activities = Activities()
