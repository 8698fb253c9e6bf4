"""Test what a silent run prints, and what it is doing."""

from __future__ import annotations

import logging

import pytest

from gkd.cluster.startup import summary
from gkd.console.terminal import Heartbeat, TeacherWatch
from gkd.spans import Activity, Phase, Progress
from gkd.types import TeacherHealth
from tests.unit.console_runs import Clock

STEP = Activity(Phase.STEP, 0.0, 3, 9)


def spoken(outermost: Activity, until_s: int) -> list[float]:
    """Return the seconds at which a run that does one thing for a long time prints a line."""
    clock, times = Clock(), []
    heartbeat, began_s = Heartbeat(clock), clock.now_s
    for _ in range(4 * until_s):
        if heartbeat.line([outermost, Activity("teacher", 2.0)]):
            times.append(clock.now_s - began_s)
        clock.now_s += 0.25
    return times


def test_lines_in_a_silence() -> None:
    """Fails if a start-up is silent for more than 5 s, or a long stage of every step fills the log."""
    times = spoken(Activity("start-up", 0.0), 60)
    assert max(b - a for a, b in zip([0.0, *times], times, strict=False)) <= 5.0 and len(times) == 14
    assert spoken(STEP, 200) == [4.0, 8.0, 16.0, 32.0, 64.0, 128.0]


def test_a_line_of_the_run_starts_a_new_silence() -> None:
    """Fails if heartbeats come although the run prints lines, or stay rare after a long stage."""
    clock, doing = Clock(), [STEP, Activity("rollout", 0.0)]
    heartbeat = Heartbeat(clock)
    clock.now_s += 4.6
    assert heartbeat.line(doing)
    clock.now_s += 15.4
    assert heartbeat.line(doing)
    heartbeat.handle(logging.makeLogRecord({"msg": "a line of the run"}))
    clock.now_s += 3.9
    assert not heartbeat.line(doing)
    clock.now_s += 0.2
    assert heartbeat.line(doing)
    clock.now_s += 99.0
    assert not heartbeat.line([])


def test_an_outage_of_the_teacher_is_reported_at_growing_intervals(gkd_log: pytest.LogCaptureFixture) -> None:
    """Fails if an outage prints a line per poll, none, or its end is not reported."""
    watch, counts = TeacherWatch(), []
    for silent_s in (0.2, 4.0, 9.0, 14.0, 19.0, 24.0, 39.0, 41.0, 0.1, 0.2, 11.0):
        watch.add(TeacherHealth(silent_s, 300.0, 3, 2, 1))
        counts.append(len(gkd_log.messages))
    assert counts == [0, 0, 0, 1, 1, 2, 2, 3, 4, 4, 5]
    first = gkd_log.messages[0]
    assert "14 s" in first and "300 s" in first and "teacher.outage_budget_s" in first
    assert watch.health.silent_s == 11.0


def test_the_count_of_ready_ranks_never_falls() -> None:
    """Fails if the start-up lines run backwards when a rank that is ready joins the weight-sync groups."""
    names, ready = ["actor rank 0", "rollout engine 0"], {"actor rank 0"}
    progress = {"actor rank 0": Progress("joining", 3.0), "rollout engine 0": Progress("starting vLLM", 4.0)}
    text = summary(names, progress, ready)
    assert "1/2" in text and "joining (3 s)" in text and "starting vLLM (4 s)" in text
    assert "2/2" in summary(names, {name: Progress(Phase.READY, 1.0) for name in names}, {*names, "of another pool"})
    many = {f"actor rank {i}": Progress("loading weights", float(i)) for i in range(9)}
    assert "9 loading weights (actor rank 8 8 s, actor rank 7 7 s, " in summary([*many], many, set())
