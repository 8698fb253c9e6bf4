"""The terminal of a run: a live panel if stderr is a terminal, otherwise lines.

Log lines are printed above the panel. Without a panel, a run that is silent for 5 s prints a line about what it is
doing. The lines themselves come from the loggers in both cases.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TextIO

import psutil
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from gkd.console.numbers import clock, count, seconds, short
from gkd.console.state import TREND_STEPS, Evaluations, RunState, bottleneck_of, is_worse, kl_of, rates_of
from gkd.log import get_logger
from gkd.spans import Activity, Phase, SpanRecorder, current_stage, described, driver
from gkd.types import TeacherHealth

log, teacher_log = get_logger("run"), get_logger("teacher")

# Draw the live panel of a run with rich: a few lines of text in a box.

FIRST_WARNING_S = 10.0  # silence of the teacher before it
_LABEL = 11  # columns
_FLAT = 0.02  # relative change that counts as none
_SCORES = {"eval/kl": "KL", "eval/reverse_kl": "k1", "eval/accuracy": "accuracy"}
_GIB = 1 << 30
Part = tuple[str, str]  # text and style


@dataclass(frozen=True, slots=True)
class View:
    """Hold what the panel shows.

    Args:
        title: the run folder.
        state: None: the run is not training yet.
        teacher: None: not known, or a local teacher.
        now_s: on the clock of `Activity.since_s`.
        elapsed_s: since the program began.
    """

    title: str
    state: RunState | None
    doing: Sequence[Activity]
    teacher: TeacherHealth | None
    now_s: float
    elapsed_s: float


def panel(view: View, width: int) -> Panel:
    """Return the panel for a terminal of `width` columns; rows that are too long are cropped."""
    rows = [_progress(view, width - 4)]
    state = view.state
    if state is not None and state.numbers:
        rows += [_loss(state), *_evaluation(state), _speed(state.numbers), *_bottleneck(state.numbers)]
    rows.append(_row("memory", *_memory({} if state is None else state.numbers)))
    if view.teacher is not None:
        rows.append(_teacher(view.teacher))
    if state is not None and state.active_alarms:
        rows.append(_row("ALARM", (", ".join(state.active_alarms), "bold red"), style="bold red"))
    rows.append(_now(view))
    texts = [Text.assemble(*row, no_wrap=True, overflow="crop") for row in rows]
    return Panel(Group(*texts), title=Text(view.title, style="bold"), title_align="left")


def _row(label: str, *parts: Part, style: str = "dim") -> list[Part]:
    """Return a row: a label, and parts with three blanks between them."""
    row: list[Part] = [(f"{label:{_LABEL}}", style)]
    for i, part in enumerate(parts):
        row += [("   ", ""), part] if i else [part]
    return row


def _progress(view: View, width: int) -> list[Part]:
    state = view.state
    if state is None:
        return _row("starting", (f"elapsed {clock(view.elapsed_s)}", ""))
    share = state.step / state.total_steps if state.total_steps else 1.0
    head = f"{state.step}/{state.total_steps} "
    tail = f" {share:.0%}   elapsed {clock(view.elapsed_s)}   ETA {clock(state.left_s)}"
    cells = max(0, width - _LABEL - len(head) - len(tail))
    full = round(share * cells)
    bar = [("━" * full, "green"), ("━" * (cells - full), "dim")]
    return [*_row("step", (head, "")), *bar, (tail, "")]


def _loss(state: RunState) -> list[Part]:
    m, (label, kl), trend = state.numbers, kl_of(state.numbers), state.trend
    parts = [(short(m["loss/total"]), "bold")]
    if kl is not None:
        parts.append((f"{label} {short(kl)}", "bold"))
        if trend is not None:
            arrow, style = ("→", "") if abs(trend) < _FLAT else ("↓", "green") if trend < 0 else ("↑", "yellow")
            parts.append((f"{arrow} {trend:+.0%} in {TREND_STEPS} steps", style))
    parts.append((f"grad {short(m.get('optim/grad_norm'))}", ""))
    parts.append((f"lr {short(m.get('optim/lr'))}", ""))
    return _row("loss", *parts)


def _evaluation(state: RunState) -> list[list[Part]]:
    found = state.evaluations
    parts = [_change(key, found, value) for key, value in found.last.items() if key in _SCORES]
    if not parts:
        return []
    return [_row("eval", *parts, (f"(step {found.step})", "dim"))]


def _change(key: str, found: Evaluations, last: float) -> Part:
    """Return "KL 0.1494 → 0.1395" and its style; the first evaluation alone has no arrow."""
    written = (lambda x: f"{x:.1%}") if key == "eval/accuracy" else short
    first = found.first.get(key)
    if found.n == 1 or first is None:
        return f"{_SCORES[key]} {written(last)}", ""
    style = "red" if is_worse(key, first, last) else "green" if is_worse(key, last, first) else ""
    return f"{_SCORES[key]} {written(first)} → {written(last)}", style


def _speed(m: Mapping[str, float]) -> list[Part]:
    rates = [(f"{pool} {count(rate)}", "") for pool, rate in rates_of(m).items()]
    return _row("tokens/s", *rates, (f"step {seconds(m['time/step_s'])}", ""))


def _bottleneck(m: Mapping[str, float]) -> list[list[Part]]:
    found = bottleneck_of(m)
    if found is None:
        return []
    age = f"staleness {m.get('staleness/mean', 0.0):.1f}, max {m.get('staleness/max', 0.0):.0f}"
    return [_row("bottleneck", (f"{found[0]} {found[1]:.0%} of the step", "bold"), (age, ""))]


def _memory(m: Mapping[str, float]) -> list[Part]:
    parts = []
    for name, end in (("actor GPU peak", "/peak_gib"), ("engine GPU", "/rollout_device_used_gib")):
        found = [v for key, v in m.items() if key.startswith("memory/") and key.endswith(end)]
        if found:
            parts.append((f"{name} {max(found):.1f} GiB", ""))
    host = psutil.virtual_memory()
    used = host.total - host.available
    style = "red" if host.available < 0.05 * host.total else ""
    parts.append((f"host {used / _GIB:.1f} of {host.total / _GIB:.0f} GiB", style))
    return parts


def _teacher(health: TeacherHealth) -> list[Part]:
    queue = (f"{health.n_in_flight} in flight, {health.n_queued} queued, {health.n_workers} workers", "")
    if health.silent_s < FIRST_WARNING_S:
        return _row("teacher", queue)
    return _row(health.label, (f"silent for {health.silent_s:.0f} of {health.budget_s:.0f} s", "bold red"), queue)


def _now(view: View) -> list[Part]:
    if not view.doing:
        return _row("now", ("-", ""))
    doing = view.doing[1:] if view.state is not None and len(view.doing) > 1 else view.doing
    since_s = current_stage(view.doing).since_s
    return _row("now", (described(doing), ""), (seconds(view.now_s - since_s), ""))


# A live panel at the bottom of a terminal, drawn by rich. Everything that the driver prints appears above it.


class LivePanel:
    """Show a panel from `start` to `stop`, when it disappears.

    Args:
        stream: the terminal; loggers that print to it print above the panel.
        draw: returns the panel for a number of columns; called by a thread of rich.
    """

    def __init__(self, stream: TextIO, draw: Callable[[int], RenderableType]) -> None:
        self._stream = stream
        console = Console(file=stream, force_terminal=True)
        self._live = Live(
            console=console, refresh_per_second=2, transient=True, get_renderable=lambda: draw(console.width)
        )
        self._moved: list[logging.StreamHandler[TextIO]] = []

    def start(self) -> None:
        self._live.start(refresh=True)  # replaces sys.stdout and sys.stderr
        for handler in logging.getLogger("gkd").handlers:
            if isinstance(handler, logging.StreamHandler) and handler.stream is self._stream:
                handler.setStream(sys.stderr)
                self._moved.append(handler)

    def stop(self) -> None:
        self._live.stop()
        for handler in self._moved:
            handler.setStream(self._stream)
        self._moved.clear()


FIRST_S = 4.0  # silence before the first line; with the poll, a line comes within 5 s also on a busy machine
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
        self._next_s = FIRST_S  # silence before the next line

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
