"""one_step_off and two_step_off, recording and replay: the loop's own logic, with the fakes of tests.unit.world."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gkd.errors import ClusterError, ConfigError, NumericsError, TeacherUnavailable
from gkd.metrics import read_metrics
from gkd.replay import check_replay
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
    with pytest.raises(NumericsError, match="one_step_off promises staleness 1"):
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


def test_a_recorded_run_can_be_trained_again(tmp_path: Path) -> None:
    """Fails if a replay trains on anything but the recorded batches in their order, or asks the engines."""
    world, again = World(), World()
    make(tmp_path, world, "trainer.total_steps=3", "trainer.record_batches=true").fit()
    batches = tmp_path / "run" / "batches"
    assert sorted(path.name for path in batches.iterdir()) == [f"step_0000000{n}_group_0.npz" for n in (1, 2, 3)]
    make(tmp_path / "again", again, "trainer.total_steps=3", f"trainer.replay={batches}").fit()
    assert again.trained == world.trained
    assert not [event for event in again.events if event.startswith(("generate", "submit"))]
    assert staleness(tmp_path / "again") == [0, 0, 0]


def test_batches_of_steps_that_are_made_again_are_not_mixed_with_the_old(tmp_path: Path) -> None:
    """Fails if a run that went back leaves batches of the future that it gave up."""
    settings = ("trainer.total_steps=4", "trainer.record_batches=true", "trainer.save_every=1", "trainer.keep_last=9")
    make(tmp_path, World(), *settings).fit()
    back = f"trainer.resume={tmp_path / 'run' / 'checkpoints' / 'step_00000002'}"
    world = World()
    world.rank_dies_at = 2
    with pytest.raises(ClusterError):
        make(tmp_path, world, *settings, back).fit()
    kept = sorted(path.name[:13] for path in (tmp_path / "run" / "batches").iterdir())
    assert kept == ["step_00000001", "step_00000002", "step_00000003"], "the third is the one that was begun"


@pytest.mark.parametrize(
    ("folder", "problem"), [("gone", "no such folder"), ("empty", "no batch of 3 of the 3"), ("own", "own batches")]
)
def test_a_replay_without_its_batches_is_refused_before_anything_starts(
    tmp_path: Path, folder: str, problem: str
) -> None:
    """Fails if a wrong folder shows in the middle of the run, or a run overwrites what it replays."""
    (tmp_path / "empty").mkdir()
    named = tmp_path / "run" / "batches" if folder == "own" else tmp_path / folder
    trainer = make(tmp_path, World(), "trainer.total_steps=3", f"trainer.replay={named}")
    with pytest.raises(ConfigError, match=f"trainer.replay.*{problem}"):
        check_replay(trainer.config, 3)
