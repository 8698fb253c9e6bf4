"""Track the phase of a rank (start-up, training), so that it can be queried while another method runs."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from gkd.spans import SpanRecorder

# Concurrency group of the method that returns the progress; the pools are spawned with it.
WATCH = "watch"

PROCESS_UP, UP = "process started", "ready"
OPENING = "opening the stream"  # a rollout engine's phase, in which it waits for all its processes

# Phase -> its name in spans.jsonl; other phases keep theirs.
SPAN_NAMES = {
    "training step": "train",
    "sending weights": "sync",
    "receiving weights": "receive_weights",
    OPENING: "open_stream",
    "evaluation": "evaluate",
    "saving a checkpoint": "save",
    "offloading states": "offload",
    "reloading states": "onload",
    "teacher scoring": "score",
    "reference logprobs": "reference",
}


@dataclass(frozen=True, slots=True)
class Progress:
    phase: str
    for_s: float  # time since the phase began


class Phases:
    """The current phase of this rank. `enter` is called by the working thread, `now` by any thread.

    Args:
        spans: records the blocks of `during`.
    """

    def __init__(self, spans: SpanRecorder) -> None:
        self._spans = spans
        self._phase, self._since = PROCESS_UP, time.monotonic()
        self._thread: int | None = None

    def enter(self, phase: str) -> None:
        self._phase, self._since = phase, time.monotonic()
        self._thread = threading.get_ident()

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Enter the phase, and return to `UP` at the end."""
        self.enter(phase)
        try:
            with self._spans.span(SPAN_NAMES.get(phase, phase.replace(" ", "_"))):
                yield
        finally:
            self.enter(UP)

    def now(self, finer: dict[str, str] | None = None) -> Progress:
        """Return the current phase.

        Args:
            finer: function name -> phase, for library code that reports no phase. The innermost of these functions on
                the stack of the working thread gives the phase.
        """
        phase = self._phase
        frame = sys._current_frames().get(self._thread) if finer and self._thread is not None else None
        found = _innermost(frame, finer or {})
        return Progress(f"{phase}: {found}" if found else phase, time.monotonic() - self._since)


def _innermost(frame: FrameType | None, finer: dict[str, str]) -> str | None:
    while frame is not None:
        if frame.f_code.co_name in finer:
            return finer[frame.f_code.co_name]
        frame = frame.f_back
    return None
