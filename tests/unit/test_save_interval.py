"""Test `trainer.save_every`: steps, times, and other values."""

from __future__ import annotations

from pathlib import Path

import pytest

from gkd.config.check_values import Interval, save_interval
from gkd.config.load import load_config
from gkd.run.saver import Saver
from tests.unit.world import World, checkpoints, make


@pytest.mark.parametrize(
    ("text", "interval"),
    [
        ("0", Interval()),
        ("50", Interval(steps=50)),
        ("1.5h", Interval(seconds=5400.0)),
        ("2 h", Interval(seconds=7200.0)),
    ],
)
def test_steps_and_times_are_read(text: str, interval: Interval) -> None:
    """Fails if a number of steps or a time is refused, or read as another one."""
    assert save_interval(load_config(None, [f"trainer.save_every={text}"]).trainer.save_every) == interval


def test_a_save_is_due_by_time_and_counts_from_the_last_one(tmp_path: Path) -> None:
    """Fails if a run saves at every step, never, or twice in an interval, also after another save or a resume."""
    now_s = [1000.0]
    trainer = make(tmp_path, World(), "trainer.total_steps=9", "trainer.save_every=30min")
    saver = Saver(
        trainer.config.trainer, trainer.folder, trainer.roles.actor, trainer.roles.scoring, clock=lambda: now_s[0]
    )
    due = []
    for step in range(1, 9):
        now_s[0] += 600.0
        due.append(saver.is_due(step))
        if due[-1] or step == 4:
            saver.save(step, trainer.source.in_flight(step))
    assert due == [False, False, True, False, False, False, True, False]


def test_a_run_saves_by_time(tmp_path: Path) -> None:
    """Fails if the loop ignores an interval in time."""
    make(tmp_path, World(), "trainer.total_steps=3", "trainer.save_every=0.000001s", "trainer.keep_last=9").fit()
    assert checkpoints(tmp_path) == ["latest", "step_00000001", "step_00000002", "step_00000003"]
