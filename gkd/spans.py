"""Record what a process does: what it is doing now, and as spans of time what it has done, in bounded memory.

Everything that shows, measures or explains what a process does reads its recorder: the terminal, the stage timers, the
memory of phases, start-up and hang reports, spans.jsonl.

Durations are of the monotonic clock; a start is put on the host's wall clock when the spans are taken. Spans of one
process do not overlap, unless their args have another `lane` (a row of the process; default 0). A process that records
more than `MAX_SPANS` between two takes merges neighbours of one name in pairs until there are at most that many; a
merged span has the number of its parts (`merged`) and the sum of their durations (`busy_s`).
"""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal, NamedTuple

import msgspec
from msgspec.structs import replace

MAX_SPANS = 200
_JOIN_S = 0.05  # `extend` starts a new span after a longer gap
_MAIN = threading.main_thread().ident
Block = AbstractContextManager[None]


class Span(msgspec.Struct, frozen=True, omit_defaults=True):  # many are sent and encoded: cheaper than a dataclass
    """Something that a process did, for the trace of a run."""

    name: str
    start_s: float  # since the epoch, on the clock of the process's host
    duration_s: float
    args: Mapping[str, float] = {}  # "lane": row of its process


class ProcessSpans(msgspec.Struct, frozen=True):
    """Spans of one process since it was last read."""

    process: str  # "driver", "actor 0", "engine 0", "scoring 0" or "teacher <name>"
    host: str
    spans: Sequence[Span]


class Phase(Enum):
    """Name what a process does: the words in logs, and the names in files.

    Args:
        words: as logs and `str` show them; with underscores the name in `memory/<phase>/...`.
        span: name in spans.jsonl and in `time/<call>/...`; empty: it is never recorded as a span.
    """

    STARTED = "process started"
    READY = "ready"
    BUILD_STUDENT = "building the student"
    BUILD_ENGINE = "building the engine"
    CACHE = "allocating the KV cache"
    LOAD_TEACHER = "loading the teacher", "teacher"
    LOAD_REFERENCE = "loading the reference", "load_reference"
    LOAD = "loading a checkpoint", "load"
    JOIN = "joining the weight-sync group", "join_group"
    STEP = "step"
    TRAIN = "training step", "train"
    EVALUATE = "evaluation", "evaluate"
    SCORE = "teacher scoring", "score"
    REFERENCE = "reference logprobs", "reference"
    LOGPROBS = "logprobs", "logprobs"
    TEACHER_HEAD = "teacher head", "teacher_head"
    SEND = "sending weights", "sync"
    RECEIVE = "receiving weights", "receive_weights"
    OPEN_STREAM = "opening the stream", "open_stream"
    GENERATE = "generating", "generate"
    OFFLOAD = "offloading states", "offload"
    ONLOAD = "reloading states", "onload"
    SAVE = "saving a checkpoint", "save"
    EXPORT = "export", "export"

    def __init__(self, words: str, span: str = "") -> None:
        self._words = words
        self.metric = words.replace(" ", "_")
        self.span = span

    def __str__(self) -> str:
        return self._words


# Stages of the driver's loop: names of its spans, and of `time/<stage>_s`.
Stage = Literal[
    "data", "rollout", "teacher", "reference", "train", "weight_sync", "usage", "eval", "checkpoint", "record", "switch"
]


class Activity(NamedTuple):
    """One level of what a process is doing.

    Args:
        what: a phase, a stage, or words that only people read.
        since_s: start, on the clock of the recorder.
        done: finished parts of `total`; total 0: unknown.
        is_span: it is recorded when it ends.
    """

    what: Phase | str
    since_s: float
    done: int = 0
    total: int = 0
    is_span: bool = False

    def __str__(self) -> str:
        words = str(self.what).replace("_", " ") if self.is_span else str(self.what)
        if self.total > 1:
            return f"{words} {self.done}/{self.total}"
        return f"{words} {self.done}" if self.done and not self.total else words


def current_stage(doing: Sequence[Activity]) -> Activity:
    """Return the activity whose duration interests: the stage within a step, otherwise the outermost one."""
    return doing[1] if len(doing) > 1 and doing[0].what is Phase.STEP else doing[0]


def described(doing: Sequence[Activity]) -> str:
    """Return e.g. "step 12/120, teacher, teacher scoring 3/8"."""
    return ", ".join(str(activity) for activity in doing)


@dataclass(frozen=True, slots=True)
class Progress:
    """Tell another process what this one is doing.

    Args:
        for_s: seconds since that began.
    """

    phase: Phase | str
    for_s: float


class SpanRecorder:
    """Record what this process is doing, and its spans since the last `take`. Thread-safe.

    Attributes:
        now: the open blocks, outermost first; replaced as a whole, so readers need no lock.
        clock: returns monotonic seconds.

    Args:
        process: its name in `ProcessSpans`.
        doing: what it does outside of all blocks, until `enter` changes that; None: nothing.
        main_only: blocks of other threads, which work ahead, are recorded, but not part of `now`. Otherwise one
            thread at a time has open blocks.
    """

    def __init__(
        self,
        process: str,
        doing: Phase | str | None = None,
        *,
        main_only: bool = False,
        clock: Callable[[], float] = time.perf_counter,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.process = process
        self.clock = clock
        self._wall = wall
        self.now: tuple[Activity, ...] = () if doing is None else (Activity(doing, clock()),)
        self._has_base = doing is not None
        self._main_only = main_only
        self._thread: int | None = None  # the one that changed `now` last
        self._host = socket.gethostname()
        self._spans: list[Span] = []  # starts on the monotonic clock
        self._lock = threading.Lock()

    def span(self, what: Phase | Stage, *, outermost: bool = False) -> Block:
        """Return a context manager that shows its block and records it, also if it raises.

        A block inside one of the same name is neither shown nor recorded on its own.

        Args:
            outermost: the block raises RuntimeError inside another recorded one, whose seconds would count twice, or
                whose peak of memory would be lost.
        """
        return self._block(Activity(what, 0.0, is_span=True), outermost=outermost)

    def doing(self, what: Phase | str, total: int = 0, done: int = 0) -> Block:
        """Return a context manager that shows its block, and does not record it.

        Args:
            total: number of its parts, for `done`.
        """
        return self._block(Activity(what, 0.0, done, total))

    @contextmanager
    def _block(self, activity: Activity, *, outermost: bool = False) -> Iterator[None]:
        outer = self.now if self._is_shown() else None
        spans = [outer_activity.what for outer_activity in outer or () if outer_activity.is_span and activity.is_span]
        if outermost and spans:
            raise RuntimeError(f"{activity.what} starts inside {spans[-1]}, which does not nest")
        if activity.what in spans:
            yield
            return
        began_s = self.clock()
        if outer is not None:
            self._show((*outer, activity._replace(since_s=began_s)))
        try:
            yield
        finally:
            ended_s = self.clock()
            if outer is not None and self._has_base and len(outer) == 1:  # it rests from now on
                outer = (outer[0]._replace(since_s=ended_s),)
            if outer is not None:
                self._show(outer)
            if activity.is_span:
                name = activity.what.span if isinstance(activity.what, Phase) else activity.what
                self.add(name, began_s, ended_s)

    def enter(self, what: Phase | str) -> None:
        """Show from now on, in place of the innermost block, what it has come to."""
        self._replace_innermost(what=what, since_s=self.clock(), done=0, total=0)

    def done(self, n: int) -> None:
        """Set the number of finished parts of the innermost block."""
        self._replace_innermost(done=n)

    def progress(self, finer: Mapping[str, Phase | str] | None = None) -> Progress:
        """Return what the process is doing; it was started with `doing`.

        Args:
            finer: function name -> phase, for library code that reports no phase. The innermost of these functions on
                the stack of the working thread gives the phase.
        """
        doing = self.now[-1]
        phases = finer or {}
        frame = sys._current_frames().get(self._thread) if phases and self._thread is not None else None
        while frame is not None and frame.f_code.co_name not in phases:
            frame = frame.f_back
        what = doing.what if frame is None else f"{doing.what}: {phases[frame.f_code.co_name]}"
        return Progress(what, self.clock() - doing.since_s)

    def add(self, name: str, began_s: float, ended_s: float) -> None:
        """Record a span between two readings of the monotonic clock."""
        with self._lock:
            self._append(Span(name, began_s, ended_s - began_s))

    def extend(self, phase: Phase, began_s: float, ended_s: float) -> None:
        """Record a part of a longer span: it continues the last one if that has the same name and ended just before.

        The span's args have the number of `parts`.
        """
        name = phase.span
        with self._lock:
            last = self._spans[-1] if self._spans else None
            if last is not None and last.name == name and began_s - last.start_s - last.duration_s <= _JOIN_S:
                args = {"parts": last.args.get("parts", 1) + 1}
                self._spans[-1] = Span(name, last.start_s, ended_s - last.start_s, args)
            else:
                self._append(Span(name, began_s, ended_s - began_s, {"parts": 1}))

    def seconds_since(self, began_s: float) -> dict[str, float]:
        """Return name -> seconds of the spans that began since then and are not taken yet."""
        with self._lock:
            spans = [span for span in self._spans if span.start_s >= began_s]
        seconds: defaultdict[str, float] = defaultdict(float)
        for span in spans:
            seconds[span.name] += span.args.get("busy_s", span.duration_s)
        return dict(seconds)

    def to_wall_s(self) -> float:
        """Return the wall clock minus the monotonic one."""
        return self._wall() - self.clock()

    def take(self, to_wall_s: float | None = None) -> ProcessSpans:
        """Return the spans since the last call, in order of their starts, on the wall clock of this host.

        Args:
            to_wall_s: see `to_wall_s`; default: measured now.
        """
        with self._lock:
            spans = self._spans
            self._spans = []
        offset_s = self.to_wall_s() if to_wall_s is None else to_wall_s
        moved = [replace(span, start_s=span.start_s + offset_s) for span in spans]
        return ProcessSpans(self.process, self._host, in_lanes(merged(moved)))

    def _is_shown(self) -> bool:
        return not self._main_only or threading.get_ident() == _MAIN

    def _show(self, now: tuple[Activity, ...]) -> None:
        self.now = now
        self._thread = threading.get_ident()

    def _replace_innermost(self, **changes: Any) -> None:
        if self.now and self._is_shown():
            self._show((*self.now[:-1], self.now[-1]._replace(**changes)))

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
    args = {**first.args, "merged": first.args.get("merged", 1.0) + second.args.get("merged", 1.0)}
    if "parts" in first.args or "parts" in second.args:
        args["parts"] = first.args.get("parts", 0.0) + second.args.get("parts", 0.0)
    args["busy_s"] = sum(span.args.get("busy_s", span.duration_s) for span in (first, second))
    return Span(first.name, first.start_s, end_s - first.start_s, args)


# The driver's recorder. As with logging there is one instance, since code anywhere in the driver reports to it.
driver = SpanRecorder("driver", main_only=True)
