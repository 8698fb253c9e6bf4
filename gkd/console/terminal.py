"""The terminal of a run: a live panel if stderr is a terminal, otherwise lines.

What this process prints appears above the panel and stays. Without a panel, a run that is silent for 5 s prints a line
about what it is doing.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console
from rich.live import Live

from gkd.console.panel import FIRST_WARNING_S, panel
from gkd.console.state import RunState
from gkd.log import get_logger
from gkd.spans import Activity, Phase, SpanRecorder, current_stage, described, driver
from gkd.types import TeacherHealth

log, teacher_log = get_logger("run"), get_logger("teacher")

FIRST_S = 4.0  # silence before the first line; with the poll, a line comes within 5 s also on a busy machine
PANEL, LINES, OFF = "panel", "lines", "off"
_TICK_S = 0.5
_PROBE_S = 5.0  # between requests of the teacher's health
_JOIN_S = 3.0  # a request of the teacher's health may take 2 s
_HEARTBEAT = {"is_heartbeat": True}  # `extra` of the records that do not end a silence


class Terminal:
    """Shows the run until the end of the block.

    Args:
        setting: `trainer.progress`; `auto`: a panel on a terminal that can draw it, else lines.
        title: of the panel.
        doing: what the driver is doing.
    """

    def __init__(self, setting: str, title: str, doing: SpanRecorder = driver) -> None:
        self.stream = sys.stderr  # what the loggers print to
        can_draw = self.stream.isatty() and os.environ.get("TERM") not in ("dumb", None)
        self.mode = setting if setting != "auto" else PANEL if can_draw else LINES
        self._doing = doing
        self._began_s = self._probed_s = doing.clock()
        self._state: RunState | None = None
        self._probe: Callable[[], TeacherHealth | None] | None = None
        self._teacher = TeacherWatch()
        self._heartbeat = Heartbeat(doing.clock)  # as a log handler it sees when the run is silent
        self._handlers: list[logging.StreamHandler[TextIO]] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="terminal", daemon=True)
        self._live = Live(
            console=Console(file=self.stream, force_terminal=True),
            refresh_per_second=2,
            transient=True,
            redirect_stdout=sys.stdout.isatty(),  # not one that the shell writes to a file
            get_renderable=lambda: panel(title, self._state, doing, self._teacher.health, self._began_s),
        )

    @contextmanager
    def watching(self, state: RunState, probe: Callable[[], TeacherHealth | None]) -> Iterator[None]:
        """Show the state of a run, and within the block the health of its teacher.

        Args:
            probe: returns it within seconds, called by another thread; None: unknown, or a local teacher.
        """
        self._state, self._probe = state, probe
        try:
            yield
        finally:
            self._probe = None

    def __enter__(self) -> Terminal:
        logging.getLogger("gkd").addHandler(self._heartbeat)
        self._handlers = _handlers_of(self.stream)
        if self.mode != LINES:
            for handler in self._handlers:
                handler.addFilter(_is_no_step_line)
        if self.mode == PANEL:
            self._live.start(refresh=True)  # replaces sys.stderr
            for handler in self._handlers:
                handler.setStream(sys.stderr)
        if self.mode != OFF:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(_JOIN_S)
        self._live.stop()
        for handler in self._handlers:
            handler.setStream(self.stream)
            handler.removeFilter(_is_no_step_line)
        logging.getLogger("gkd").removeHandler(self._heartbeat)

    def _run(self) -> None:
        while not self._ended.wait(_TICK_S):
            self.tick()

    def tick(self) -> None:
        """Ask for the teacher's health where that is due, and without a panel log a heartbeat."""
        now_s, probe = self._doing.clock(), self._probe
        if probe is not None and now_s - self._probed_s >= _PROBE_S:
            self._probed_s = now_s
            if (health := probe()) is not None:
                self._teacher.add(health)
        if self.mode == LINES and (line := self._heartbeat.line(self._doing.now)):
            log.info("%s", line, extra=_HEARTBEAT)


def _handlers_of(stream: TextIO) -> list[logging.StreamHandler[TextIO]]:
    """Return the handlers of all loggers that print to the stream."""
    loggers = [logging.root, *logging.root.manager.loggerDict.values()]
    handlers = [each for logger in loggers if isinstance(logger, logging.Logger) for each in logger.handlers]
    return [each for each in handlers if isinstance(each, logging.StreamHandler) and each.stream is stream]


def _is_no_step_line(record: logging.LogRecord) -> bool:
    return not hasattr(record, "is_step_line")


class Heartbeat(logging.Handler):
    """Return a line after 4 s without a log line and then every 4 s; within a step after 4, 8, 16, 32 s, and so on.

    Steps recur, so that a long stage of each step would fill a log file otherwise.

    Args:
        clock: that of the activities.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__(logging.INFO)
        self._clock = clock
        self._since_s = clock()  # start of the silence
        self._next_s = FIRST_S  # its length at the next line

    def emit(self, record: logging.LogRecord) -> None:
        if not hasattr(record, "is_heartbeat"):
            self._since_s, self._next_s = self._clock(), FIRST_S

    def line(self, doing: Sequence[Activity]) -> str:
        """Return the line that is due now about the activities, outermost first, or an empty string."""
        now_s = self._clock()
        silent_s = now_s - self._since_s
        if silent_s < self._next_s or not doing:
            return ""
        self._next_s = 2 * silent_s if doing[0].what is Phase.STEP else silent_s + FIRST_S
        return f"{described(doing)}: {now_s - current_stage(doing).since_s:.0f} s so far"


class TeacherWatch:
    """Receives the health of the teacher and logs a warning after 10, 20, 40, ... s of silence, and when it ends."""

    def __init__(self) -> None:
        self.health: TeacherHealth | None = None  # the newest one
        self._next_s = FIRST_WARNING_S  # silence before the next warning

    def add(self, health: TeacherHealth) -> None:
        self.health = health
        if health.silent_s >= self._next_s:
            self._next_s *= 2
            teacher_log.warning(
                "%s silent for %.0f s, waiting up to %.0f s (teacher.outage_budget_s)",
                health.label,
                health.silent_s,
                health.budget_s,
            )
        elif health.silent_s < FIRST_WARNING_S < self._next_s:
            teacher_log.warning("the teacher replies again after more than %.0f s", self._next_s / 2)
            self._next_s = FIRST_WARNING_S
