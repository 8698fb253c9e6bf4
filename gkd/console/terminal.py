"""The terminal of a run: a live panel if stderr is a terminal, otherwise lines.

Log lines are printed above the panel. Without a panel, a run that is silent for 5 s prints a line about what it is
doing. The lines themselves come from the loggers in both cases.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TextIO

from rich.panel import Panel

from gkd.console.panel import FIRST_WARNING_S, LivePanel, View, panel
from gkd.console.state import RunState
from gkd.log import get_logger
from gkd.spans import Activity, Phase, SpanRecorder, current_stage, described, driver
from gkd.types import TeacherHealth

log, teacher_log = get_logger("run"), get_logger("teacher")

FIRST_S = 4.0  # of silence; with the poll, a line comes within 5 s also on a busy machine
PANEL, LINES, OFF = "panel", "lines", "off"
_TICK_S = 0.5
_PROBE_S = {True: 2.5, False: 15.0}  # between requests of the teacher's health: in a long stage, and otherwise
_JOIN_S = 3.0  # a request of the teacher's health may take 2 s
_HEARTBEAT = {"is_heartbeat": True}  # `extra` of the records that do not end a silence


def resolve_mode(setting: str, stream: TextIO) -> str:
    """Return the mode of `trainer.progress`; `auto`: a panel on a terminal that can draw it, else lines."""
    if setting != "auto":
        return setting
    return PANEL if stream.isatty() and os.environ.get("TERM") not in ("dumb", None) else LINES


class Terminal:
    """Shows the run until the end of the block.

    Args:
        setting: `trainer.progress`.
        title: of the panel.
        stream: what the loggers print to.
        doing: what the driver is doing.
    """

    def __init__(self, setting: str, title: str, stream: TextIO | None = None, doing: SpanRecorder = driver) -> None:
        self.stream = sys.stderr if stream is None else stream
        self.mode = resolve_mode(setting, self.stream)
        self._title, self._doing = title, doing
        self._began_s = doing.clock()
        self._state: RunState | None = None
        self._probe: Callable[[], TeacherHealth | None] | None = None
        self._probed_s = self._began_s
        self._teacher = TeacherWatch()
        self._heartbeat = Heartbeat()
        self._pulse = _Pulse(doing.clock)
        self._live: LivePanel | None = None
        self._quiet: list[logging.Handler] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="terminal", daemon=True)

    @contextmanager
    def watching(self, state: RunState, probe: Callable[[], TeacherHealth | None]) -> Iterator[None]:
        """Show the state of a run, and within the block the health of its teacher.

        Args:
            probe: returns the health of the teacher within seconds; None: unknown, or a local teacher. It is called
                by another thread.
        """
        self._state, self._probe = state, probe
        try:
            yield
        finally:
            self._probe = None

    def __enter__(self) -> Terminal:
        logger = logging.getLogger("gkd")
        if self.mode != LINES:
            self._quiet = [
                h for h in logger.handlers if isinstance(h, logging.StreamHandler) and h.stream is self.stream
            ]
            for handler in self._quiet:
                handler.addFilter(_is_no_step_line)
        logger.addHandler(self._pulse)
        if self.mode == PANEL:
            self._live = LivePanel(self.stream, self._draw)
            self._live.start()
        if self.mode != OFF:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(_JOIN_S)
        if self._live is not None:
            self._live.stop()
        logging.getLogger("gkd").removeHandler(self._pulse)
        for handler in self._quiet:
            handler.removeFilter(_is_no_step_line)

    def _run(self) -> None:
        while not self._ended.wait(_TICK_S):
            self.tick()

    def tick(self) -> None:
        """Ask for the teacher's health where that is due, and log a heartbeat or redraw the panel."""
        now_s, doing = self._doing.clock(), self._doing.now
        probe = self._probe
        is_long = bool(doing) and now_s - current_stage(doing).since_s >= FIRST_S
        is_long = is_long or self._teacher.is_silent
        if probe is not None and (is_long or self._live) and now_s - self._probed_s >= _PROBE_S[is_long]:
            self._probed_s = now_s
            if (health := probe()) is not None:
                self._teacher.add(health)
        if self._live is None and (line := self._heartbeat.line(self._doing.clock(), self._pulse.spoke_s, doing)):
            log.info("%s", line, extra=_HEARTBEAT)

    def _draw(self, width: int) -> Panel:
        now_s = self._doing.clock()
        return panel(
            View(self._title, self._state, self._doing.now, self._teacher.health, now_s, now_s - self._began_s), width
        )


class _Pulse(logging.Handler):
    """Keeps the time of the newest log line that is not a heartbeat."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__(logging.INFO)
        self._clock, self.spoke_s = clock, clock()

    def emit(self, record: logging.LogRecord) -> None:
        if not hasattr(record, "is_heartbeat"):
            self.spoke_s = self._clock()


def _is_no_step_line(record: logging.LogRecord) -> bool:
    return not hasattr(record, "is_step_line")


class Heartbeat:
    """Return a line after 4 s of silence and then every 4 s; within a step after 4, 8, 16, 32, 64 s, and so on.

    Steps recur, so that a long stage of each step would fill a log file otherwise.
    """

    def __init__(self) -> None:
        self._since_s: float | None = None  # begin of the silence
        self._next_s = FIRST_S  # of silence

    def line(self, now_s: float, spoke_s: float, doing: Sequence[Activity]) -> str:
        """Return the line that is due now, or an empty string.

        Args:
            spoke_s: time of the newest line of the run.
            doing: the current activities, outermost first.
        """
        if spoke_s != self._since_s:
            self._since_s, self._next_s = spoke_s, FIRST_S
        silent_s = now_s - spoke_s
        if silent_s < self._next_s or not doing:
            return ""
        self._next_s = 2 * silent_s if doing[0].what is Phase.STEP else silent_s + FIRST_S
        return f"{described(doing)}: {now_s - current_stage(doing).since_s:.0f} s so far"


class TeacherWatch:
    """Receives the health of the teacher and logs a warning after 10, 20, 40, ... s of silence, and when it ends."""

    def __init__(self) -> None:
        self.health: TeacherHealth | None = None  # the newest one
        self._next_s = FIRST_WARNING_S
        self._warned_s = 0.0

    @property
    def is_silent(self) -> bool:
        """Return whether a silence is reported whose end is not."""
        return self._warned_s > 0

    def add(self, health: TeacherHealth) -> None:
        self.health = health
        if health.silent_s >= self._next_s:
            self._warned_s, self._next_s = health.silent_s, 2 * self._next_s
            teacher_log.warning(
                "%s silent for %.0f s, waiting up to %.0f s (teacher.outage_budget_s)",
                health.label,
                health.silent_s,
                health.budget_s,
            )
        elif health.silent_s < self._warned_s:
            teacher_log.warning("the teacher replies again after more than %.0f s", self._warned_s)
            self._warned_s, self._next_s = 0.0, FIRST_WARNING_S
