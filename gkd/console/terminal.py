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
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from typing import Any, TextIO, cast

from rich.ansi import AnsiDecoder
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from gkd.console.numbers import clock, seconds, short
from gkd.console.state import SCORES, RunState, changed, loss_fields, speed_fields
from gkd.log import get_logger
from gkd.run import interrupts
from gkd.spans import Activity, Phase, SpanRecorder, current_stage, described, driver
from gkd.types import TeacherHealth

log = get_logger("run")
teacher_log = get_logger("teacher")

FIRST_WARNING_S = 10.0  # silence of the teacher before it
FIRST_S = 4.0  # silence before the first line; with the poll, a line comes within 5 s also on a busy machine
PANEL = "panel"
LINES = "lines"
OFF = "off"
_TICK_S = 0.5
_PROBE_S = 5.0  # between requests of the teacher's health
_JOIN_S = 3.0  # a request of the teacher's health may take 2 s
# One thread at a time draws: rich finds the first row of the panel, and writes later. A panel of another height that is
# drawn between the two would let it paint over printed lines.
_DRAWING = threading.RLock()
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
        self._threads = [threading.Thread(target=self._repeat, args=(self.tick,), daemon=True)]
        self._screen = Console(file=self.stream, force_terminal=True)
        self._redirected = ExitStack()
        self._live = Live(
            console=self._screen,
            auto_refresh=False,  # its thread would not take `_DRAWING`
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
            # The empty row takes the echo of Ctrl-C, which behind the panel's last column would begin another row.
            get_renderable=lambda: Group(panel(title, self._state, doing, self._teacher.health, self._began_s), ""),
        )

    @contextmanager
    def watching(self, state: RunState, probe: Callable[[], TeacherHealth | None]) -> Iterator[None]:
        """Show the state of a run, and within the block the health of its teacher.

        Args:
            probe: returns it within seconds, called by another thread; None: unknown, or a local teacher.
        """
        self._state = state
        self._probe = probe
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
            self._redirected.enter_context(redirect_stderr(self._above(self.stream)))
            if sys.stdout.isatty():  # not one that the shell writes to a file
                self._redirected.enter_context(redirect_stdout(self._above(sys.stdout)))
            with _DRAWING:
                self._live.start(refresh=True)
            for handler in self._handlers:
                handler.setStream(sys.stderr)
            self._threads.append(threading.Thread(target=self._repeat, args=(self._draw,), daemon=True))
        for thread in self._threads if self.mode != OFF else ():
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(_JOIN_S)
        with _DRAWING:
            self._redirected.close()
            self._live.stop()
        for handler in self._handlers:
            handler.setStream(self.stream)
            handler.removeFilter(_is_no_step_line)
        logging.getLogger("gkd").removeHandler(self._heartbeat)

    def _above(self, stream: TextIO) -> TextIO:
        return cast(TextIO, _Above(self._screen, stream))

    def _repeat(self, work: Callable[[], None]) -> None:
        while not self._ended.wait(_TICK_S):
            work()

    def _draw(self) -> None:
        with _DRAWING:
            self._live.refresh()

    def tick(self) -> None:
        """Ask for the teacher's health where that is due, and without a panel log a heartbeat."""
        now_s = self._doing.clock()
        probe = self._probe
        if probe is not None and now_s - self._probed_s >= _PROBE_S:
            self._probed_s = now_s
            if (health := probe()) is not None:
                self._teacher.add(health)
        if self.mode == LINES and (line := self._heartbeat.line(self._doing.now)):
            log.info("%s", line, extra=_HEARTBEAT)


class _Above:
    """Standard output or error while the panel is shown: whole lines, each put together by the thread that prints it.

    The proxy of rich has one buffer for all threads, in which they lose parts of lines.
    """

    def __init__(self, screen: Console, stream: TextIO) -> None:
        self._screen = screen
        self._stream = stream
        self._begun = threading.local()

    def __getattr__(self, name: str) -> Any:  # encoding, isatty and the like
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        lines, end, rest = (getattr(self._begun, "text", "") + text).rpartition("\n")
        self._begun.text = rest
        if end:
            above = Text("\n").join(map(AnsiDecoder().decode_line, lines.split("\n")))
            with _DRAWING:
                self._screen.print(above)
        return len(text)

    def flush(self) -> None:
        if getattr(self._begun, "text", ""):
            self.write("\n")


def _handlers_of(stream: TextIO) -> list[logging.StreamHandler[TextIO]]:
    """Return the handlers of all loggers that print to the stream."""
    loggers = [logging.root, *logging.root.manager.loggerDict.values()]
    handlers = [handler for logger in loggers if isinstance(logger, logging.Logger) for handler in logger.handlers]
    return [handler for handler in handlers if isinstance(handler, logging.StreamHandler) and handler.stream is stream]


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
            self._since_s = self._clock()
            self._next_s = FIRST_S

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


def panel(
    title: str, state: RunState | None, driver: SpanRecorder, teacher: TeacherHealth | None, began_s: float
) -> Panel:
    """Return the panel; rows that are too long for the terminal are cropped.

    Args:
        title: the run folder.
        state: None: the run is not training yet.
        teacher: None: not known, or a local teacher.
        began_s: start of the program, on the clock of `driver`.
    """
    doing = driver.now
    now_s = driver.clock()
    rows = Table.grid(padding=(0, 3, 0, 0), expand=True)
    rows.add_column(style="dim", no_wrap=True)
    rows.add_column(ratio=1, no_wrap=True, overflow="crop")
    if state is None:
        rows.add_row("starting", f"elapsed {clock(now_s - began_s)}")
    else:
        rows.add_row("step", _progress(state, now_s - began_s))
        _add_numbers(rows, state)
    if teacher is not None:
        queue = f"{teacher.n_in_flight} in flight, {teacher.n_queued} queued, {teacher.n_workers} workers"
        silence = f"silent for {teacher.silent_s:.0f} of {teacher.budget_s:.0f} s"
        is_silent = teacher.silent_s >= FIRST_WARNING_S
        rows.add_row(teacher.label, _joined(Text(silence, "bold red"), queue) if is_silent else queue)
    if doing:
        inner = doing[1:] if state is not None and len(doing) > 1 else doing
        rows.add_row("now", _joined(described(inner), seconds(now_s - current_stage(doing).since_s)))
    name, answer = interrupts.answer()
    if name:
        rows.add_row(name, answer, style="bold red")
    return Panel(rows, title=Text(title, style="bold"), title_align="left")


def _progress(state: RunState, elapsed_s: float) -> Table:
    share = state.step / state.total_steps if state.total_steps else 1.0
    row = Table.grid(padding=(0, 1, 0, 0), expand=True)
    row.add_column(no_wrap=True)
    row.add_column(ratio=1)
    row.add_column(no_wrap=True, overflow="crop")
    times = f"{share:.0%}   elapsed {clock(elapsed_s)}   ETA {clock(state.left_s)}"
    row.add_row(f"{state.step}/{state.total_steps}", ProgressBar(1.0, share), times)
    return row


def _add_numbers(rows: Table, state: RunState) -> None:
    """Add rows about the newest step and evaluation, red where a number became worse."""
    m = state.numbers
    if m:
        optimizer = f"grad {short(m.get('optim/grad_norm'))}", f"lr {short(m.get('optim/lr'))}"
        rows.add_row("train", _joined(*loss_fields(state), *optimizer))
    texts = [f"{SCORES[key]} {changed(key, *values)}" for key, values in state.scores().items()]
    if texts:
        scores = [Text(text, "red" if text.endswith("worse") else "") for text in texts]
        rows.add_row("eval", _joined(*scores, f"(step {state.evaluations[-1][0]})"))
    if m:
        age = f"staleness {m.get('staleness/mean', 0.0):.1f}, max {m.get('staleness/max', 0.0):.0f}"
        rows.add_row("speed", _joined(*speed_fields(m), age))
    if state.active_alarms:
        rows.add_row("ALARM", ", ".join(state.active_alarms), style="bold red")


def _joined(*pieces: str | Text) -> Text:
    return Text("   ").join(Text(part) if isinstance(part, str) else part for part in pieces)
