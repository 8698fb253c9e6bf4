"""Test the log line of a step."""

from __future__ import annotations

import itertools
import logging

import pytest

from gkd.console.numbers import clock, count, seconds, short
from gkd.console.state import MAX_LINE, PREFIX, STEP_LINE, step_line
from tests.unit.console_runs import line, run

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
    for value, steps in itertools.product(EXTREMES, (1, 10**7)):
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


@pytest.mark.parametrize(
    ("missing", "label"), [({}, "KL"), ({"loss/sampled_reverse_kl": 0.2}, "k1"), ({"loss/token_kl": 0.3}, "KL")]
)
def test_without_a_distribution_the_line_has_the_estimate(missing: dict[str, float], label: str) -> None:
    """Fails if a run with a sampled signal has no KL in its line, or one without any KL has no line."""
    m = line(loss__token_kl=None, perf__bound_by_rollout=None, perf__bound_by_actor=None) | missing
    state = run()
    state.add(1, m)
    fields = step_line(state).split("  ")
    assert any(field.startswith(label) for field in fields) == bool(missing)
    assert not any(field.endswith("%") for field in fields)


def test_numbers_have_a_bounded_width() -> None:
    """Fails if a number is wider than its field, or loses its size."""
    values = [
        sign * digits * 10.0**power for sign in (1, -1) for digits in (1.0, 9.9999999) for power in range(-20, 21)
    ]
    assert max(len(short(value)) for value in values) <= 8
    assert max(len(count(abs(value))) for value in values if abs(value) < 1e15) <= 5
    assert max(len(clock(abs(value))) for value in values if abs(value) < 1e11) <= 8
    assert (short(None), short(0.0), short(12.3456), short(0.00012)) == ("-", "0", "12.35", "0.0001")
    assert (count(999.4), count(999.6), count(3520), count(120000)) == ("999", "1.0k", "3.5k", "120k")
    assert [seconds(x) for x in (0.934, 9.996, 59.9, 185.0, None)] == ["0.93 s", "10.0 s", "59.9 s", "3:05", "-"]
    assert [clock(x) for x in (7.2, 3723.0, 3600.0 * 100, None)] == ["0:07", "1:02:03", "4d4h", "-"]
    assert STEP_LINE  # the panel recognizes the records by it
