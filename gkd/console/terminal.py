"""The terminal of a run: a live panel if stderr is a terminal, otherwise lines.

Log lines are printed above the panel. Without a panel, a run that is silent for 5 s prints a line about what it is
doing. The lines themselves come from the loggers in both cases.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

from gkd.console.silence import FIRST_S, Heartbeat, TeacherWatch, current_stage
from gkd.console.state import RunState
from gkd.log import get_logger
from gkd.spans import SpanRecorder, driver
from gkd.types import TeacherHealth

if TYPE_CHECKING:
    from rich.panel import Panel

    from gkd.console.panel import LivePanel

log = get_logger("run")

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
            from gkd.console.panel import LivePanel

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
        from gkd.console.panel import View, panel

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
