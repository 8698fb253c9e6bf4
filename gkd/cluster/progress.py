"""How far a process has come with its start: what a rank says of itself while another method of it runs."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

# Concurrency group of the method that tells it; the pools are spawned with it.
WATCH = "watch"

PROCESS_UP, UP = "process up", "up"


@dataclass(frozen=True, slots=True)
class Progress:
    phase: str
    for_s: float  # how long it has been in it


class Phases:
    """Keeps the phase that this rank is in. `enter` is called by the thread that works, `now` by any."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._phase, self._since = PROCESS_UP, clock()
        self._thread: int | None = None

    def enter(self, phase: str) -> None:
        self._phase, self._since = phase, self._clock()
        self._thread = threading.get_ident()

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """In this phase, and then up again."""
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(UP)

    def now(self, finer: dict[str, str] | None = None) -> Progress:
        """
        Args:
            finer: function -> phase, for code that is not ours and tells nothing: the innermost of these functions that
                the working thread is in names the phase.
        """
        phase = self._phase
        frame = sys._current_frames().get(self._thread) if finer and self._thread is not None else None
        found = _innermost(frame, finer or {})
        return Progress(f"{phase}: {found}" if found else phase, self._clock() - self._since)


def _innermost(frame: FrameType | None, finer: dict[str, str]) -> str | None:
    while frame is not None:
        if frame.f_code.co_name in finer:
            return finer[frame.f_code.co_name]
        frame = frame.f_back
    return None
