"""Draw the live panel of a run with rich: a few lines of text in a box."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TextIO

import psutil
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from gkd.console.numbers import clock, count, seconds, short
from gkd.console.state import TREND_STEPS, Evaluations, RunState, bottleneck_of, is_worse, kl_of, rates_of
from gkd.spans import Activity, current_stage, described
from gkd.types import TeacherHealth

FIRST_WARNING_S = 10.0  # of the teacher's silence
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
