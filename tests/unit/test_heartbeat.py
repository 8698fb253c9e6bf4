"""Test what a silent run prints, and what it is doing."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from gkd.cluster.startup import summary
from gkd.config.schema_sections import DataConfig
from gkd.console.terminal import Heartbeat, TeacherWatch
from gkd.data.prompts import RowReader, load_prompts
from gkd.spans import Activity, Phase, Progress, SpanRecorder, driver
from gkd.types import TeacherHealth
from tests.unit.console_runs import Clock

STEP = Activity(Phase.STEP, 0.0, 3, 9)


def spoken(outermost: Activity, until_s: int) -> list[float]:
    """Return the seconds at which a run that does one thing for a long time prints a line."""
    heartbeat, doing = Heartbeat(), [outermost, Activity("teacher", 2.0)]
    return [t / 4 for t in range(4 * until_s) if heartbeat.line(t / 4, 0.0, doing)]


def test_lines_in_a_silence() -> None:
    """Fails if a start-up is silent for more than 5 s, or a long stage of every step fills the log."""
    times = spoken(Activity("start-up", 0.0), 60)
    assert max(b - a for a, b in zip([0.0, *times], times, strict=False)) <= 5.0 and len(times) == 14
    assert spoken(STEP, 200) == [4.0, 8.0, 16.0, 32.0, 64.0, 128.0]


def test_a_line_of_the_run_starts_a_new_silence() -> None:
    """Fails if heartbeats come although the run prints lines, or stay rare after a long stage."""
    heartbeat, doing = Heartbeat(), [STEP, Activity("rollout", 0.0)]
    assert heartbeat.line(4.6, 0.0, doing) and heartbeat.line(20.0, 0.0, doing)
    assert not heartbeat.line(23.9, 20.0, doing)
    assert heartbeat.line(24.1, 20.0, doing)
    assert not heartbeat.line(99.0, 20.0, [])


def test_a_line_names_the_stage_and_its_duration() -> None:
    """Fails if the seconds are those of the whole step, or the finished parts are missing."""
    doing = [STEP, Activity("teacher", 10.0), Activity("teacher scoring", 10.5, 3, 8)]
    line = Heartbeat().line(18.0, 9.0, doing)
    assert line.startswith("step 3/9, teacher, teacher scoring 3/8: 8 s")
    assert str(Activity("rows", 0.0, 512)) == "rows 512" and str(Activity("init model", 0.0, 0, 1)) == "init model"


def test_activities_nest_and_end_with_an_error() -> None:
    """Fails if a failed stage stays on the screen, or a thread that works ahead replaces the stage of the loop."""
    clock = Clock()
    doing = SpanRecorder("driver", main_only=True, clock=clock)
    with pytest.raises(ValueError), doing.doing(Phase.STEP, 2, 1), doing.span("teacher"):  # noqa: SIM117
        with doing.doing("scores", 4):
            clock.now_s += 1.0
            doing.done(3)
            assert [str(a) for a in doing.now] == ["step 1/2", "teacher", "scores 3/4"]
            seen: list[int] = []

            def work_ahead() -> None:
                with doing.span("rollout", outermost=True):
                    doing.done(4)
                    seen.append(len(doing.now))

            thread = threading.Thread(target=work_ahead)
            thread.start()
            thread.join()
            assert seen == [3] and doing.now[-1].done == 3
            raise ValueError
    assert doing.now == () and {span.name for span in doing.take().spans} == {"teacher", "rollout"}


def test_an_outage_of_the_teacher_is_reported_at_growing_intervals(gkd_log: pytest.LogCaptureFixture) -> None:
    """Fails if an outage prints a line per poll, none, or its end is not reported."""
    watch, counts = TeacherWatch(), []
    for silent_s in (0.2, 4.0, 9.0, 14.0, 19.0, 24.0, 39.0, 41.0, 0.1, 0.2, 11.0):
        watch.add(TeacherHealth(silent_s, 300.0, 3, 2, 1))
        counts.append(len(gkd_log.messages))
    assert counts == [0, 0, 0, 1, 1, 2, 2, 3, 4, 4, 5]
    first = gkd_log.messages[0]
    assert "14 s" in first and "300 s" in first and "teacher.outage_budget_s" in first
    assert watch.health is not None and watch.health.silent_s == 11.0


def test_the_count_of_ready_ranks_never_falls() -> None:
    """Fails if the start-up lines run backwards when a rank that is ready joins the weight-sync groups."""
    names, ready = ["actor rank 0", "rollout engine 0"], {"actor rank 0"}
    progress = {"actor rank 0": Progress("joining", 3.0), "rollout engine 0": Progress("starting vLLM", 4.0)}
    text = summary(names, progress, ready)
    assert "1/2" in text and "joining (3 s)" in text and "starting vLLM (4 s)" in text
    assert "2/2" in summary(names, {name: Progress(Phase.READY, 1.0) for name in names}, {*names, "of another pool"})


def test_tokenizing_shows_the_row(tmp_path: Path) -> None:
    """Fails if a start that tokenizes millions of prompts looks as if it hung."""
    file = tmp_path / "train.jsonl"
    file.write_text('{"prompt": "a"}\n' * 600)
    seen: set[str] = set()

    def tokenizer(text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        seen.update(str(activity) for activity in driver.now[-1:])
        return {"input_ids": [1]}

    load_prompts([str(file)], "data.train_files", RowReader(DataConfig(), tokenizer))
    assert sorted(name.rpartition(" ")[2] for name in seen) == ["256", "512", "row"] and driver.now == ()
