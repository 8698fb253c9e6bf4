"""Draw the live panel of a run with rich: a few rows of text in a box."""

from __future__ import annotations

from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from gkd.console.numbers import clock, seconds, short
from gkd.console.state import SCORES, RunState, changed, loss_fields, speed_fields
from gkd.run import interrupts
from gkd.spans import SpanRecorder, current_stage, described
from gkd.types import TeacherHealth

FIRST_WARNING_S = 10.0  # silence of the teacher before it


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
