"""one_step_off and two_step_off: the loop's own logic, with the fakes of tests.unit.world."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gkd.errors import CheckpointError, ClusterError, NumericsError, TeacherError, TeacherUnavailable
from gkd.metrics.writer import read_metrics
from tests.unit.world import World, make

AHEAD = {"one_step_off": 1, "two_step_off": 2}


def staleness(tmp_path: Path) -> list[float]:
    return [line["staleness/max"] for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if "loss/total" in line]


@pytest.mark.parametrize("scheduler", AHEAD)
def test_the_engines_answer_the_next_batch_while_this_one_is_trained_on(tmp_path: Path, scheduler: str) -> None:
    """Fails if a scheduler ahead answers with other weights than it promises, or pushes while answers are written."""
    ahead = AHEAD[scheduler]
    world = World()
    make(tmp_path, world, "trainer.total_steps=5", f"trainer.scheduler={scheduler}").fit()
    answered = [event for event in world.events if event.startswith("generate")]
    assert answered == [f"generate n=1 seed={10 + s} v={max(0, s - ahead)}" for s in range(5)]
    assert staleness(tmp_path) == [min(s, ahead) for s in range(5)]
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert all(line[f"staleness/share_{min(s, ahead)}"] == 1 for s, line in enumerate(lines))
    for version in range(1, 5):
        before = world.events[: world.events.index(f"push {version}")]
        # Two chunks a batch, all of the batches begun so far: nothing is being answered while weights change.
        assert before.count("chunk") == 2 * sum(event.startswith("generate") for event in before)
        assert sum(event.startswith("generate") for event in before) == min(version + ahead, 5)
    whole = World()
    make(tmp_path / "sync", whole, "trainer.total_steps=5").fit()
    assert world.trained == whole.trained, "the same prompts in the same order as under sync"


@pytest.mark.parametrize("scheduler", AHEAD)
def test_what_is_in_flight_is_in_the_checkpoint(tmp_path: Path, scheduler: str) -> None:
    """Fails if a batch that was answered before the checkpoint is lost, answered again by newer weights, or trained on
    twice, after a resume.
    """
    ahead = AHEAD[scheduler]
    settings = ("trainer.total_steps=6", f"trainer.scheduler={scheduler}", "trainer.save_every=1")
    whole = World()
    make(tmp_path / "whole", whole, *settings).fit()
    world = World()
    world.rank_dies_at = 3
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
    # Those in flight are not answered again, and the ones after them by the weights that would have answered them.
    assert [event for event in again.events if event.startswith("generate")] == [
        f"generate n=1 seed={10 + s} v={s - ahead}" for s in range(3 + ahead, 6)
    ]
    assert staleness(tmp_path) == staleness(tmp_path / "whole")
    assert not (tmp_path / "run" / "checkpoints" / "step_00000006" / "in_flight").exists()


@pytest.mark.parametrize("scheduler", AHEAD)
def test_a_lost_teacher_costs_no_rollout_in_flight(tmp_path: Path, scheduler: str) -> None:
    """Fails if the last save waits for scores that never come, or the resumed run answers anew what is in flight."""
    settings = ("trainer.total_steps=6", f"trainer.scheduler={scheduler}")
    whole = World()
    make(tmp_path / "whole", whole, *settings).fit()
    world = World()
    world.teacher_dies_at = 3
    with pytest.raises(TeacherUnavailable):
        make(tmp_path, world, *settings).fit()
    recorded = [event for event in world.events if event.startswith("record ")]
    assert recorded == [f"record batch_{n:08d} unscored" for n in range(3, 3 + AHEAD[scheduler])]
    again = World()
    make(tmp_path, again, *settings, "trainer.resume=auto").fit()
    assert world.trained + again.trained == whole.trained
    assert sum(event.startswith("generate") for event in again.events) == 6 - 3 - AHEAD[scheduler]


def test_an_error_of_the_engines_reaches_the_loop(tmp_path: Path) -> None:
    """Fails if the thread beside the loop dies in silence and the loop waits for ever."""

    class Broken(World):
        def generate(self, *args, **kwargs):  # type: ignore[no-untyped-def]
            if self.engine_version == 1:
                raise ClusterError("rollout engine 0: the process died")
            yield from super().generate(*args, **kwargs)

    world = Broken()
    with pytest.raises(ClusterError, match="engine 0"):
        make(tmp_path, world, "trainer.total_steps=6", "trainer.scheduler=one_step_off").fit()
    assert len(world.trained) == 2


def test_a_batch_that_is_staler_than_promised_is_not_trained_on(tmp_path: Path) -> None:
    """Fails if engines that missed a weight sync go unnoticed, because some staleness is allowed."""
    world = World()
    world.lag = 1
    with pytest.raises(NumericsError, match="one_step_off: staleness is at most 1"):
        make(tmp_path, world, "trainer.total_steps=6", "trainer.scheduler=one_step_off").fit()
    assert len(world.trained) == 1, "the first batch was to be fresh, and is one step old"


def test_a_run_that_goes_on_past_its_end_begins_new_batches(tmp_path: Path) -> None:
    """Fails if a finished run cannot be extended, because nothing is in flight at its end."""
    world, again, whole = World(), World(), World()
    make(tmp_path, world, "trainer.total_steps=3", "trainer.scheduler=two_step_off").fit()
    settings = ("trainer.scheduler=two_step_off", "trainer.resume=auto")
    make(tmp_path, again, "trainer.total_steps=6", *settings).fit()
    make(tmp_path / "whole", whole, "trainer.total_steps=6").fit()
    assert world.trained + again.trained == whole.trained


@pytest.mark.parametrize("error", [TeacherUnavailable, TeacherError])
@pytest.mark.parametrize("polls", [0, 2, 99])
def test_a_lost_teacher_costs_no_save_under_way(tmp_path: Path, error: type[Exception], polls: int) -> None:
    """Fails if scores that do not come take the student's part of a checkpoint along, or the ranks are asked for the
    next save while they still write this one.
    """
    world = World()
    world.polls_per_save = polls
    world.scores_fail = error("refused")
    settings = ("trainer.total_steps=6", "trainer.scheduler=one_step_off", "trainer.save_every=2")
    make(tmp_path, world, *settings).fit()
    recorded = [event for event in world.events if event.startswith("record ")]
    assert recorded == [f"record batch_0000000{n} {how}" for n in (2, 4) for how in ("scored", "unscored")]
    again = World()
    make(tmp_path, again, *settings, f"trainer.resume={tmp_path / 'run' / 'checkpoints' / 'step_00000004'}").fit()
    assert again.trained == world.trained[4:]


def test_a_save_waits_for_scores_that_are_on_their_way(tmp_path: Path) -> None:
    """Fails if a checkpoint is committed without the files of what is in flight, or training waits for them."""
    world = World()
    world.recordings_take = 1  # poll
    settings = ("trainer.total_steps=6", "trainer.scheduler=one_step_off", "trainer.save_every=3")
    make(tmp_path, world, *settings).fit()
    events = [e for e in world.events if e.startswith(("record", "save", "train"))]
    begun = ["save", "record batch_00000003 scored", "train", "train"]
    assert events[3:] == [*begun, "saved 3", "train", "save", "saved 6"]
    assert (tmp_path / "run" / "checkpoints" / "step_00000003" / "in_flight").is_dir()


def test_a_full_disk_for_what_is_in_flight_fails_the_save_and_leaves_no_rank_writing(tmp_path: Path) -> None:
    """Fails if a checkpoint without its rollouts is committed, or its half is left."""
    world = World()
    world.polls_per_save = 5
    world.scores_fail = CheckpointError("scoring endpoint 0: No space left on device")
    settings = ("trainer.total_steps=6", "trainer.scheduler=one_step_off", "trainer.save_every=2")
    with pytest.raises(CheckpointError, match="No space left"):
        make(tmp_path, world, *settings).fit()
    assert "saved 2" in world.events, "the ranks have finished what they were at"
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == []
