"""How a run ends and goes on: what is saved and exported whatever fails, against the fakes of `test_trainer`."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from gkd.errors import CheckpointError, ClusterError, ModelError, RankTimeout, TeacherUnavailable
from gkd.metrics.run_metrics import RunMetrics
from gkd.metrics.writer import read_metrics
from gkd.run.ending import LAST_SAVE_WAIT_S
from tests.unit.world import PROMPTS, World, checkpoints, make


def test_whatever_ends_the_run_a_save_under_way_is_waited_for(tmp_path: Path) -> None:
    """Fails if a bug costs a save that is nearly written, or a hung rank delays the run's end by an hour."""
    for error, wait_s in ((ClusterError, LAST_SAVE_WAIT_S), (RuntimeError, None)):
        world = World()
        world.polls_per_save = 9
        if error is ClusterError:
            world.rank_dies_at = 2
        else:
            world.bug_at = 2
        with pytest.raises(error):
            make(tmp_path / error.__name__, world, "trainer.total_steps=9", "trainer.save_every=2").fit()
        assert world.waits_s == [wait_s if wait_s is None else pytest.approx(wait_s, abs=1)]
        assert checkpoints(tmp_path / error.__name__) == ["latest", "step_00000002"]


def test_a_late_rank_is_looked_at_before_anything_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if the ranks are asked where they hang after a minute of waiting for a save, when most have given up."""
    world = World()
    world.polls_per_save = 9
    order: list[str] = []

    def hang(*_: object) -> None:
        raise RankTimeout("train_step: no answer", ["actor rank 1"])

    def look(error: RankTimeout) -> RankTimeout:
        order.append(f"looked {error.late} {world.waits_s}")
        return RankTimeout(f"{error}\n  actor rank 1 hangs", error.late, diagnosed=True)

    trainer = make(tmp_path, world, "trainer.total_steps=9", "trainer.save_every=2")
    trainer.roles = replace(trainer.roles, diagnose_hang=look)
    step = world.train_step
    monkeypatch.setattr(world, "train_step", lambda batch: hang() if trainer.step == 3 else step(batch))
    with pytest.raises(RankTimeout, match="actor rank 1 hangs") as raised:
        trainer.fit()
    assert order == ["looked ('actor rank 1',) []"] and raised.value.diagnosed
    assert world.waits_s == [pytest.approx(LAST_SAVE_WAIT_S, abs=1)]


def test_a_file_that_cannot_be_written_ends_the_run_with_its_name(tmp_path: Path) -> None:
    """Fails if a full disk ends in a traceback, or costs the save under way."""
    world = World()
    world.polls_per_save = 9
    settings = ("trainer.total_steps=9", "trainer.save_every=2", "eval.every=3")
    trainer = make(tmp_path, world, *settings, val=PROMPTS[:1])
    (tmp_path / "run" / "samples").mkdir()
    (tmp_path / "run" / "samples" / ".tmp_step_00000003.jsonl").mkdir()
    trainer.folder.forget_after = lambda step: None  # type: ignore[method-assign]  # would take it out of the way
    with pytest.raises(CheckpointError, match=r"step_00000003\.jsonl cannot be written: .*Is a directory"):
        trainer.fit()
    assert checkpoints(tmp_path) == ["latest", "step_00000002"]
    assert [line["step"] for line in read_metrics(tmp_path / "run" / "metrics.jsonl")] == [0, 1, 2, 3]


def test_what_ended_the_run_is_said_before_the_wait(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Fails if the user looks at a silent run for a minute, or reads of the lost save first."""
    world = World()
    world.polls_per_save, world.rank_dies_at, world.save_hangs = 9, 2, True
    with pytest.raises(ClusterError, match="the process died"):
        make(tmp_path, world, "trainer.total_steps=9", "trainer.save_every=2").fit()
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert ["died" in said[0], "the pending save failed, too" in said[1]] == [True, True]


@pytest.mark.parametrize(("dies_at", "failures", "left"), [(3, 99, 3), (2, 1, 2)])
def test_a_lost_teacher_s_save_does_not_depend_on_the_one_before(
    tmp_path: Path, dies_at: int, failures: int, left: int
) -> None:
    """Fails if a background save that failed keeps the last step from being saved, or passes for one of that step."""
    world = World()
    world.polls_per_save, world.save_fails_at, world.save_failures, world.teacher_dies_at = 9, 2, failures, dies_at
    with pytest.raises(TeacherUnavailable):
        make(tmp_path, world, "trainer.total_steps=9", "trainer.save_every=2").fit()
    assert checkpoints(tmp_path) == ["latest", f"step_{left:08d}"]


def exported(tmp_path: Path) -> str:
    assert not list((tmp_path / "run").glob(".trash_export"))
    return (tmp_path / "run" / "export" / "of_version").read_text()


def test_the_student_is_exported_also_where_its_last_save_fails(tmp_path: Path) -> None:
    """Fails if a run of weeks ends with neither a checkpoint nor a student, or with success."""
    for name, export_fails in (("a", False), ("b", True)):
        world = World()
        world.save_fails_at, world.export_fails = 2, export_fails
        with pytest.raises(CheckpointError, match="No space left"):
            make(tmp_path / name, world, "trainer.total_steps=2").fit()
        assert (tmp_path / name / "run" / "export").exists() != export_fails
    assert exported(tmp_path / "a") == "2"


def test_an_export_takes_the_place_of_the_one_before(tmp_path: Path) -> None:
    """Fails if a longer run keeps its old export, or loses it to a new one that could not be written."""
    make(tmp_path, World(), "trainer.total_steps=1").fit()
    world = World()
    world.export_fails = True
    with pytest.raises(ModelError, match="No space left"):
        make(tmp_path, world, "trainer.total_steps=2", "trainer.resume=auto").fit()
    assert exported(tmp_path) == "1"
    make(tmp_path, World(), "trainer.total_steps=3", "trainer.resume=auto").fit()
    assert exported(tmp_path) == "3"
    assert not list((tmp_path / "run").glob(".*export*"))


def test_a_branch_without_a_step_left_has_a_checkpoint_of_its_own(tmp_path: Path) -> None:
    """Fails if such a branch cannot be gone on with once the run that it came from is deleted."""
    make(tmp_path, World(), "trainer.total_steps=2").fit()
    two = tmp_path / "run" / "checkpoints" / "step_00000002"
    make(tmp_path / "branch", World(), "trainer.total_steps=2", f"trainer.resume={two}").fit()
    assert checkpoints(tmp_path / "branch") == ["latest", "step_00000002"]
    again = World()
    make(tmp_path, again, "trainer.total_steps=2", "trainer.resume=auto").fit()
    assert "save" not in again.events, "its own is there already"


def test_going_back_takes_the_answers_of_given_up_steps_along(tmp_path: Path) -> None:
    """Fails if samples/ shows answers of a student that never was, beside metrics that end before it."""
    settings = ("trainer.save_every=1", "trainer.keep_last=9", "eval.every=1")
    make(tmp_path, World(), "trainer.total_steps=4", *settings, val=PROMPTS[:1]).fit()
    two = tmp_path / "run" / "checkpoints" / "step_00000002"
    make(tmp_path, World(), "trainer.total_steps=3", *settings, f"trainer.resume={two}", val=PROMPTS[:1]).fit()
    names = sorted(path.name for path in (tmp_path / "run" / "samples").iterdir())
    assert names == [f"step_0000000{i}.jsonl" for i in range(4)]


def test_lines_are_flushed_before_the_save_that_needs_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a power cut can leave a checkpoint whose steps have no line."""
    world = World()
    sync = RunMetrics.sync

    def noted(self: RunMetrics) -> None:
        sync(self)
        world.events.append("sync")

    monkeypatch.setattr(RunMetrics, "sync", noted)
    make(tmp_path, world, "trainer.total_steps=2", "trainer.save_every=1").fit()
    events = [event for event in world.events if event in ("sync", "save", "train")]
    assert events == ["sync", "train", "sync", "save", "train", "sync", "save"], "at step 0 there is nothing to save"
