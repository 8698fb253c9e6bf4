"""Test the log line of a step, and the live panel as a terminal of some width shows it."""

from __future__ import annotations

import io
import itertools
import logging

import pytest
from rich.cells import cell_len
from rich.console import Console

from gkd.console.numbers import short
from gkd.console.state import MAX_LINE, PREFIX, RunState, loss_fields, step_line
from gkd.console.terminal import panel
from gkd.spans import Phase, SpanRecorder
from gkd.types import TeacherHealth
from tests.unit.console_runs import Clock, line, run

EXTREMES = (
    0.0,
    1e-12,
    -1e-12,
    0.00012345,
    -0.0123456,
    9.99996,
    99.996,
    -99999.9,
    1.2345e15,
    float("inf"),
    float("nan"),
)


def logged(text: str) -> str:
    """Return the line as the logger of the trainer prints it."""
    record = logging.LogRecord("gkd.trainer", logging.INFO, "", 0, "%s", (text,), None)
    return logging.Formatter("%(asctime)s [%(name)s] %(message)s", datefmt="%H:%M:%S").format(record)


def test_the_line_has_at_most_110_characters() -> None:
    """Fails if long numbers break the line of a log viewer, or drop step, ETA, loss or KL."""
    assert MAX_LINE == 110 and len(logged("")) == PREFIX
    for value, steps in itertools.product(EXTREMES, (10, 10**7)):
        state = run(steps)
        for step in range(steps - 9, steps):
            state.add(step, line(loss__total=value, loss__token_kl=value, time__step_s=0.001))
        worst = line(
            loss__total=value, loss__token_kl=value, time__step_s=1.2e9, time__eval_s=1.1e9, health__falling_overlap=1.0
        )
        for numbers in (worst, worst | {"health/another": 1.0}):
            state.add(steps - 1, numbers)
            text = step_line(state, "set teacher.max_in_flight to 65536")
            assert len(logged(text)) <= 110
            assert text.split("  ")[0] == f"step {steps - 1}/{steps}" and text.split("  ")[1].startswith("ETA ")
            assert text.split("  ")[2] == f"loss {short(value)}" and text.split("  ")[3].startswith(
                f"KL {short(value)}"
            )


def test_the_line_of_a_usual_step() -> None:
    """Fails if a field is missing, or an evaluation looks like a slow step."""
    state = run(120)
    state.add(12, line())
    fields = step_line(state).split("  ")
    assert fields == ["step 12/120", "ETA 1:40", "loss 0.1478", "KL 0.1395", "0.93 s", "3.8k tok/s", "rollout 54%"]
    assert step_line(state, "a remark").split("  ")[4] == "a remark"
    state.add(13, line(time__step_s=4.93, time__eval_s=4.0, health__gap=1.0, health__calm=0.0))
    fields = step_line(state).split("  ")
    assert fields[4:] == ["ALARM gap", "4.93 s (eval 4.00)"]


HEALTH = TeacherHealth(0.2, 300.0, 61, 2, 12)


def drawn(state: RunState | None, width: int, *, health: TeacherHealth | None = HEALTH, color: bool = False) -> str:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=width, color_system="standard" if color else None)
    clock = Clock()
    doing, began_s = SpanRecorder("driver", clock=clock), clock.now_s
    with doing.doing(Phase.STEP, 120, 42), doing.span("teacher"), doing.doing("teacher scoring", 8, 3):
        clock.now_s += 62.0
        console.print(panel("runs/mine", state, doing, health, began_s))
    return file.getvalue()


def trained(n_steps: int = 42, **changes: float | None) -> RunState:
    state = run(120)
    state.add(0, {"eval/kl": 0.1494, "eval/accuracy": 0.133, "time/eval_s": 2.0, "time/step_s": 2.0})
    for step in range(1, n_steps + 1):
        state.add(step, line(**({"loss__token_kl": 0.2 - 0.002 * step} | changes)))
    return state


@pytest.mark.parametrize("width", [40, 60, 80, 140, 300])
def test_the_panel_fits_the_terminal(width: int) -> None:
    """Fails if a line is wider than the terminal, which breaks the panel into pieces at each refresh."""
    state = trained(loss__total=1.23456e-17, health__truncated_share=1.0, eval__kl=0.1, eval__accuracy=0.9)
    rows = drawn(state, width).splitlines()
    assert {cell_len(row) for row in rows} == {width}
    assert len(rows) == len(drawn(state, 140).splitlines()), "no line is wrapped"


def test_neither_an_outage_nor_an_alarm_makes_the_line_contradict_itself() -> None:
    """Fails if the remaining time falls while no step is made, or an alarm of a risen KL is next to a falling KL."""
    clock = Clock()
    state = run(clock=clock)
    for step in range(1, 43):
        state.add(step, line(loss__token_kl=0.2 - 0.002 * step))
    assert loss_fields(state)[1].endswith("%")
    clock.now_s += 1.0
    left_s = state.left_s
    clock.now_s += 60.0
    assert left_s is not None and state.left_s == left_s
    state.add(43, line(health__kl_rises=1.0))
    assert loss_fields(state)[1] == "KL 0.1395"


def test_missing_numbers_leave_their_line_out() -> None:
    """Fails if a run without KL, evaluation, pools' times, teacher or steps has no panel."""
    nothing = line(loss__token_kl=None, perf__bound_by_rollout=None, perf__bound_by_actor=None, optim__lr=None)
    state = run(0)
    state.add(1, nothing)
    assert state.left_s == 0.0
    text = drawn(state, 80, health=None)
    assert "KL" not in text and "rollout" not in text and "eval" not in text and "in flight" not in text
    assert "starting" in drawn(None, 80) and "0/120" in drawn(run(120), 80)


def test_worse_scores_and_a_silent_teacher_are_red() -> None:
    """Fails if a run that gets worse, or waits for a lost teacher, looks like any other."""
    red = "\x1b[31m"
    better, worse = ({"eval__kl": 0.1, "eval__accuracy": 0.3}, {"eval__kl": 0.4, "eval__accuracy": 0.0})
    assert red not in drawn(trained(**better), 100, color=True)
    assert drawn(trained(**worse), 100, color=True).count(red) == 2
    lost = TeacherHealth(42.0, 300.0, 3, 2, 0)
    assert "silent for 42 of 300 s" in drawn(trained(), 100, health=lost)
    assert "\x1b[1;31msilent" in drawn(trained(), 100, health=lost, color=True)
