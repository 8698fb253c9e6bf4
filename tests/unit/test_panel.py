"""Test the live panel as a terminal of some width shows it."""

from __future__ import annotations

import io

import pytest
from rich.cells import cell_len
from rich.console import Console

from gkd.console.state import RunState
from gkd.console.terminal import View, panel
from gkd.spans import Activity, Phase
from gkd.types import TeacherHealth
from tests.unit.console_runs import line, run

DOING = (Activity(Phase.STEP, 1.0, 42, 120), Activity("teacher", 3.0), Activity("teacher scoring", 3.0, 3, 8))
HEALTH = TeacherHealth(0.2, 300.0, 61, 2, 12)


def drawn(state: RunState | None, width: int, *, health: TeacherHealth | None = HEALTH, color: bool = False) -> str:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=width, color_system="standard" if color else None)
    console.print(panel(View("runs/mine", state, DOING, health, now_s=7.0, elapsed_s=62.0), width))
    return file.getvalue()


def trained(n_steps: int = 42, **changes: float | None) -> RunState:
    state = run(120, eval_every=20)
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


def test_the_panel_shows_what_a_user_looks_for() -> None:
    """Fails if the panel lacks one of the numbers that its documentation names."""
    text = drawn(trained(eval__kl=0.05, eval__accuracy=0.9), 100)
    for shown in (
        *("runs/mine", "42/120", "35%", "elapsed 1:02", "ETA 1:", "loss", "0.1478", "KL 0.116", "↓ -14%", "grad 0.56"),
        *("KL 0.1494 → 0.05", "accuracy 13.3% → 90.0%", "rollout 7.0k", "teacher 42k", "actor 14k", "rollout 54%"),
        *("staleness 0.5, max 1", "GiB", "61 in flight, 12 queued, 2 workers", "teacher scoring 3/8", "4.00 s"),
    ):
        assert shown in text, shown
    assert "ALARM" not in text and "ALARM" in drawn(trained(health__gap=1.0), 100)


def test_missing_numbers_leave_their_line_out() -> None:
    """Fails if a run without KL, evaluation, pools' times, teacher or steps has no panel."""
    nothing = line(loss__token_kl=None, perf__bound_by_rollout=None, perf__bound_by_actor=None, optim__lr=None)
    state = run(0)
    state.add(1, nothing)
    assert state.left_s == 0.0
    text = drawn(state, 80, health=None)
    assert "KL" not in text and "bottleneck" not in text and "eval" not in text and "in flight" not in text
    assert "starting" in drawn(None, 80) and "0/120" in drawn(run(120), 80)


def test_worse_scores_and_a_silent_teacher_are_red() -> None:
    """Fails if a run that gets worse, or waits for a lost teacher, looks like any other."""
    red, green = "\x1b[31m", "\x1b[32m"
    better, worse = ({"eval__kl": 0.1, "eval__accuracy": 0.3}, {"eval__kl": 0.4, "eval__accuracy": 0.0})
    assert red not in drawn(trained(**better), 100, color=True) and green in drawn(trained(**better), 100, color=True)
    assert drawn(trained(**worse), 100, color=True).count(red) == 2
    lost = TeacherHealth(42.0, 300.0, 3, 2, 0)
    assert "silent for 42 of 300 s" in drawn(trained(), 100, health=lost)
    assert "\x1b[1;31msilent" in drawn(trained(), 100, health=lost, color=True)
