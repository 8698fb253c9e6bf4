"""Record what a process does as spans of time, in bounded memory.

Durations are of the monotonic clock; a start is put on the host's wall clock when the spans are taken. Spans of one
process do not overlap, unless their args have another `lane` (a row of the process; default 0). A process that records
more than `MAX_SPANS` between two takes merges neighbours of one name in pairs until there are at most that many; a
merged span has the number of its parts (`merged`) and the sum of their durations (`busy_s`).
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from msgspec.structs import replace

from gkd.types import ProcessSpans, Span

MAX_SPANS = 200
_JOIN_S = 0.05  # `extend` starts a new span after a longer gap


class SpanRecorder:
    """Spans of this process since the last `take`. Thread-safe.

    Args:
        process: its name in `ProcessSpans`.
    """

    def __init__(
        self,
        process: str,
        *,
        clock: Callable[[], float] = time.perf_counter,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.process, self._clock, self._wall = process, clock, wall
        self._host = socket.gethostname()
        self._spans: list[Span] = []  # starts on the monotonic clock
        self._open: list[str] = []
        self._lock = threading.Lock()

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Record the block, also if it raises. A block inside one of the same name is not recorded on its own."""
        if name in self._open:
            yield
            return
        self._open.append(name)
        began_s = self._clock()
        try:
            yield
        finally:
            self._open.remove(name)
            self.add(name, began_s, self._clock())

    def add(self, name: str, began_s: float, ended_s: float) -> None:
        """Record a span between two readings of the monotonic clock."""
        with self._lock:
            self._append(Span(name, began_s, ended_s - began_s))

    def extend(self, name: str, began_s: float, ended_s: float) -> None:
        """Record a part of a longer span: it continues the last one if that has the same name and ended just before.

        The span's args have the number of `parts`.
        """
        with self._lock:
            last = self._spans[-1] if self._spans else None
            if last is not None and last.name == name and began_s - last.start_s - last.duration_s <= _JOIN_S:
                args = {"parts": last.args.get("parts", 1) + 1}
                self._spans[-1] = Span(name, last.start_s, ended_s - last.start_s, args)
            else:
                self._append(Span(name, began_s, ended_s - began_s, {"parts": 1}))

    def to_wall_s(self) -> float:
        """Return the wall clock minus the monotonic one, from the fastest of three readings.

        The process may lose the processor between the two clocks; that would shift every span.
        """
        readings = []
        for _ in range(3):
            before_s, wall_s, after_s = self._clock(), self._wall(), self._clock()
            readings.append((after_s - before_s, wall_s - before_s))
        return min(readings)[1]

    def take(self, to_wall_s: float | None = None) -> ProcessSpans:
        """Return the spans since the last call, in order of their starts, on the wall clock of this host.

        Args:
            to_wall_s: see `to_wall_s`; default: measured now.
        """
        with self._lock:
            spans, self._spans = self._spans, []
        if to_wall_s is None:
            to_wall_s = self.to_wall_s()
        moved = [replace(span, start_s=span.start_s + to_wall_s) for span in spans]
        return ProcessSpans(self.process, self._host, in_lanes(merged(moved)))

    def _append(self, span: Span) -> None:
        self._spans.append(span)
        if len(self._spans) > 2 * MAX_SPANS:
            self._spans = merged(self._spans)


def merged(spans: Sequence[Span]) -> list[Span]:
    """Return at most MAX_SPANS, in order of their starts: neighbours of one name are merged in pairs until they fit."""
    result = sorted(spans, key=lambda span: (span.start_s, -span.duration_s))
    while len(result) > MAX_SPANS:
        single: dict[str, int] = {}  # name -> index of its last span that is not merged with another one
        kept: list[Span] = []
        for span in result:
            index = single.pop(span.name, None)
            if index is None:
                single[span.name] = len(kept)
                kept.append(span)
            else:
                kept[index] = _pair(kept[index], span)
        result = kept
    return result


def in_lanes(spans: Sequence[Span]) -> list[Span]:
    """Return the spans, which are in order of their starts, each in the first lane that is free when it starts."""
    ends: list[float] = []  # end of each lane's last span
    result = []
    for span in spans:
        lane = next((lane for lane, end_s in enumerate(ends) if end_s <= span.start_s), len(ends))
        ends[lane : lane + 1] = [span.start_s + span.duration_s]
        result.append(replace(span, args={**span.args, "lane": lane}) if lane else span)
    return result


def _pair(first: Span, second: Span) -> Span:
    end_s = max(first.start_s + first.duration_s, second.start_s + second.duration_s)
    args = dict(first.args)
    for key, value in {"parts": 0.0, "merged": 1.0}.items():
        if key in first.args or key in second.args or key == "merged":
            args[key] = first.args.get(key, value) + second.args.get(key, value)
    args["busy_s"] = sum(span.args.get("busy_s", span.duration_s) for span in (first, second))
    return Span(first.name, first.start_s, end_s - first.start_s, args)
