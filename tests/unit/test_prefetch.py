"""Test the prefetching schedulers one_step_off and two_step_off with the fakes of `tests.unit.world`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gkd.errors import CheckpointError, ClusterError, TeacherError, TeacherUnavailable
from gkd.metrics.writer import read_metrics
from tests.unit.world import World, make, staleness

AHEAD = {"one_step_off": 1, "two_step_off": 2}


@pytest.mark.parametrize("scheduler", AHEAD)
def test_batches_are_generated_with_the_weights_of_the_schedule(tmp_path: Path, scheduler: str) -> None:
    """Fails if a prefetched batch is generated with the wrong weights, or weights are pushed during generation."""
    ahead = AHEAD[scheduler]
    world = World()
    make(tmp_path, world, "trainer.total_steps=5", f"trainer.scheduler={scheduler}").fit()
    generated = [event for event in world.events if event.startswith("generate")]
    assert generated == [f"generate n=1 seed={10 + s} v={max(0, s - ahead)}" for s in range(5)]
    assert staleness(tmp_path) == [min(s, ahead) for s in range(5)]
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert all(line[f"staleness/share_{min(s, ahead)}"] == 1 for s, line in enumerate(lines))
    for version in range(1, 5):
        before = world.events[: world.events.index(f"push {version}")]
        # Each batch has two chunks. All started batches are complete, so no request is in flight during the push.
        assert before.count("chunk") == 2 * sum(event.startswith("generate") for event in before)
        assert sum(event.startswith("generate") for event in before) == min(version + ahead, 5)
    whole = World()
    make(tmp_path / "sync", whole, "trainer.total_steps=5").fit()
    assert world.trained == whole.trained, "the same prompts in the same order as under sync"


@pytest.mark.parametrize("scheduler", AHEAD)
def test_a_checkpoint_contains_the_batches_in_flight(tmp_path: Path, scheduler: str) -> None:
    """Fails if a resume loses a prefetched batch, generates it again, or trains on it twice."""
    ahead = AHEAD[scheduler]
    settings = ("trainer.total_steps=6", f"trainer.scheduler={scheduler}", "trainer.save_every=1")
    whole = World()
    make(tmp_path / "whole", whole, *settings).fit()
    world = World(rank_dies_at=3)
    with pytest.raises(ClusterError):
        make(tmp_path, world, *settings).fit()
    folder = tmp_path / "run" / "checkpoints" / "step_00000003"
    assert {path.name for path in (folder / "in_flight").iterdir()} == {
        f"batch_{number:08d}_group_0.npz" for number in range(3, 3 + ahead)
    }
    state = json.loads((folder / "trainer.json").read_text())
    assert state == {"step": 3, "sampler_position": 2 * (3 + ahead), "unfinished": []}
    again = World()
    make(tmp_path, again, *settings, "trainer.resume=auto").fit()
    assert world.trained + again.trained == whole.trained
    # Batches in flight are not generated again. Later batches use the same weights as without the interruption.
    assert [event for event in again.events if event.startswith("generate")] == [
        f"generate n=1 seed={10 + s} v={s - ahead}" for s in range(3 + ahead, 6)
    ]
    assert staleness(tmp_path) == staleness(tmp_path / "whole")
    assert not (tmp_path / "run" / "checkpoints" / "step_00000006" / "in_flight").exists()


@pytest.mark.parametrize("scheduler", AHEAD)
def test_a_teacher_failure_keeps_the_rollouts_in_flight(tmp_path: Path, scheduler: str) -> None:
    """Fails if the last save waits for scores of a dead teacher, or the resumed run regenerates batches in flight."""
    settings = ("trainer.total_steps=6", f"trainer.scheduler={scheduler}")
    whole = World()
    make(tmp_path / "whole", whole, *settings).fit()
    world = World(teacher_dies_at=3)
    with pytest.raises(TeacherUnavailable):
        make(tmp_path, world, *settings).fit()
    recorded = [event for event in world.events if event.startswith("record ")]
    assert recorded == [f"record batch_{n:08d} unscored" for n in range(3, 3 + AHEAD[scheduler])]
    again = World()
    make(tmp_path, again, *settings, "trainer.resume=auto").fit()
    assert world.trained + again.trained == whole.trained
    assert sum(event.startswith("generate") for event in again.events) == 6 - 3 - AHEAD[scheduler]


def test_a_finished_run_can_be_extended(tmp_path: Path) -> None:
    """Fails if a finished run, which has no batch in flight, cannot be extended."""
    world, again, whole = World(), World(), World()
    make(tmp_path, world, "trainer.total_steps=3", "trainer.scheduler=two_step_off").fit()
    make(tmp_path, again, "trainer.total_steps=6", "trainer.scheduler=two_step_off", "trainer.resume=auto").fit()
    make(tmp_path / "whole", whole, "trainer.total_steps=6").fit()
    assert world.trained + again.trained == whole.trained


@pytest.mark.parametrize("error", [TeacherUnavailable, TeacherError])
@pytest.mark.parametrize("polls", [0, 2, 99])
def test_missing_scores_keep_a_pending_save(tmp_path: Path, error: type[Exception], polls: int) -> None:
    """Fails if missing scores discard the student's files, or the next save starts while ranks are still writing."""
    world = World(polls_per_save=polls, scores_fail=error("refused"))
    settings = ("trainer.total_steps=6", "trainer.scheduler=one_step_off", "trainer.save_every=2")
    make(tmp_path, world, *settings).fit()
    recorded = [event for event in world.events if event.startswith("record ")]
    assert recorded == [f"record batch_0000000{n} {how}" for n in (2, 4) for how in ("scored", "unscored")]
    again = World()
    make(tmp_path, again, *settings, f"trainer.resume={tmp_path / 'run' / 'checkpoints' / 'step_00000004'}").fit()
    assert again.trained == world.trained[4:]


def test_a_save_waits_for_pending_scores(tmp_path: Path) -> None:
    """Fails if a checkpoint is committed without the batches in flight, or training waits for their scores."""
    world = World(polls_per_recording=1)
    make(tmp_path, world, "trainer.total_steps=6", "trainer.scheduler=one_step_off", "trainer.save_every=3").fit()
    events = [e for e in world.events if e.startswith(("record", "save", "train"))]
    first_save = ["save", "record batch_00000003 scored", "train", "train"]
    assert events[3:] == [*first_save, "saved 3", "train", "save", "saved 6"]
    assert (tmp_path / "run" / "checkpoints" / "step_00000003" / "in_flight").is_dir()


def test_a_full_disk_while_recording_rollouts_fails_the_save(tmp_path: Path) -> None:
    """Fails if a checkpoint without its rollouts is committed, or partial files remain."""
    world = World(polls_per_save=5, scores_fail=CheckpointError("scoring endpoint 0: No space left on device"))
    settings = ("trainer.total_steps=6", "trainer.scheduler=one_step_off", "trainer.save_every=2")
    with pytest.raises(CheckpointError):
        make(tmp_path, world, *settings).fit()
    assert "saved 2" in world.events, "the ranks have finished writing"
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == []
