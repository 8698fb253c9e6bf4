"""Test trainer.record_batches and trainer.replay: complete batches, their order, and matching scores."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from gkd.config.load import load_config
from gkd.config.schema import Config
from gkd.errors import CheckpointError, ClusterError, GkdError
from gkd.preflight.replay import _check_scores, check_replay
from tests.refusals import refuses
from tests.unit.world import World, make, staleness

TEACHER = {"name": "t", "fingerprint": "f"}
STEPS = "trainer.total_steps=3"


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    make(tmp_path / "first", World(), STEPS, "trainer.record_batches=true").fit()
    return tmp_path / "first" / "run" / "batches"


@pytest.mark.parametrize("scheduler", ["sync", "two_step_off"])
def test_a_replay_trains_on_the_recorded_batches(tmp_path: Path, scheduler: str) -> None:
    """Fails if a replay changes the recorded batches or their order, generates or scores, or refuses stale batches of
    another scheduler.
    """
    world, again = World(), World()
    make(tmp_path, world, STEPS, "trainer.record_batches=true", f"trainer.scheduler={scheduler}").fit()
    batches = tmp_path / "run" / "batches"
    folders = [f"step_0000000{n}" for n in (1, 2, 3)]
    assert sorted(path.name for path in batches.iterdir()) == ["config.yaml", *folders, "teacher.json"]
    trainer = make(tmp_path / "again", again, STEPS, f"trainer.replay={batches}")
    check_replay(trainer.config, 3, TEACHER)
    trainer.fit()
    assert again.trained == world.trained
    assert not [event for event in again.events if event.startswith(("generate", "submit"))]
    assert staleness(tmp_path / "again") == staleness(tmp_path)


def test_rewinding_deletes_the_recorded_batches_of_discarded_steps(tmp_path: Path) -> None:
    """Fails if a rewound run keeps recorded batches of discarded steps, or an incomplete batch."""
    settings = ("trainer.total_steps=4", "trainer.record_batches=true", "trainer.save_every=1", "trainer.keep_last=9")
    make(tmp_path, World(), *settings).fit()
    back = f"trainer.resume={tmp_path / 'run' / 'checkpoints' / 'step_00000002'}"
    world = World(rank_dies_at=2)
    with pytest.raises(ClusterError):
        make(tmp_path, world, *settings, back).fit()
    batches = tmp_path / "run" / "batches"
    assert sorted(path.name for path in batches.glob("step_*")) == ["step_00000001", "step_00000002"]
    make(tmp_path, World(), *settings, "trainer.resume=auto").fit()
    assert not list(batches.glob(".tmp_*")), "leftovers of the failed step"
    assert len(list(batches.glob("step_*"))) == 4


@pytest.mark.parametrize("folder", ["gone", "empty", "own"])
def test_a_folder_without_batches_is_refused(tmp_path: Path, folder: str) -> None:
    """Fails if a wrong folder is found only during the run, or a run overwrites the batches that it replays."""
    named = tmp_path / "run" / "batches" if folder == "own" else tmp_path / folder
    trainer = make(tmp_path, World(), STEPS, f"trainer.replay={named}")
    if folder != "gone":
        named.mkdir(parents=True)
    with refuses("trainer.replay", str(named)) as caught:
        check_replay(trainer.config, 3, TEACHER)
    assert ("3 of the 3" in caught.value.problem) == (folder == "empty")


@pytest.mark.parametrize(
    ("removed", "problem"),
    [
        ("step_00000002", "1 of the 3.* step 2"),
        ("step_00000002/batch_group_0.npz", r"batch_group_0\.npz"),
        ("step_00000002/manifest.json", r"step_00000002: manifest\.json"),
        ("config.yaml", r"config\.yaml"),
        ("teacher.json", r"teacher\.json"),
    ],
)
def test_incomplete_batches_are_refused(tmp_path: Path, recorded: Path, removed: str, problem: str) -> None:
    """Fails if an incomplete batch is trained on."""
    path = recorded / removed
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    trainer = make(tmp_path, World(), STEPS, f"trainer.replay={recorded}")
    with pytest.raises(GkdError, match=problem):
        check_replay(trainer.config, 3, TEACHER)


def test_a_corrupted_batch_is_not_trained_on(tmp_path: Path, recorded: Path) -> None:
    """Fails if a corrupted batch is trained on."""
    file = recorded / "step_00000002" / "batch_group_0.npz"
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    world = World()
    with pytest.raises(CheckpointError, match=r"batch_group_0\.npz"):
        make(tmp_path, world, STEPS, f"trainer.replay={recorded}").fit()
    assert len(world.trained) == 1


def test_a_replay_may_start_at_a_resumed_step(tmp_path: Path) -> None:
    """Fails if batches of a branch, or of a run that recorded only later steps, cannot be replayed."""
    settings = ("trainer.total_steps=4", "trainer.save_every=2", "trainer.keep_last=9")
    first, again = World(), World()
    make(tmp_path, World(), *settings).fit()
    start = f"trainer.resume={tmp_path / 'run' / 'checkpoints' / 'step_00000002'}"
    make(tmp_path, first, *settings, start, "trainer.record_batches=true").fit()
    trainer = make(tmp_path / "branch", again, *settings, start, f"trainer.replay={tmp_path / 'run' / 'batches'}")
    check_replay(trainer.config, 4, TEACHER)
    trainer.fit()
    assert again.trained == first.trained and len(first.trained) == 2


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("teacher.topk=3", "teacher.topk"),
        ("trainer.global_batch_size=3", "trainer.global_batch_size"),
        ("distill.loss=k1", "trainer.replay"),
    ],
)
def test_scores_of_other_settings_are_refused(tmp_path: Path, recorded: Path, override: str, key: str) -> None:
    """Fails if a replay accepts scores that its own settings would not produce."""
    trainer = make(tmp_path, World(), STEPS, f"trainer.replay={recorded}", override)
    with refuses(key):
        check_replay(trainer.config, 3, TEACHER)


@pytest.mark.parametrize(("before", "now"), [(2, 0), (0, 2), (2, 2)])
def test_hidden_states_of_a_refreshed_teacher_are_refused(before: int, now: int) -> None:
    """Fails if hidden states of a refreshed teacher are multiplied by the LM head of another step."""
    local = ["teacher.backend=local", "teacher.path=t", "trainer.replay=batches"]

    def settings(interval: int, signal: str) -> Config:
        return load_config(None, [*local, f"teacher.update_interval={interval}", f"teacher.signal={signal}"])

    with refuses("trainer.replay"):
        _check_scores(settings(before, "hidden"), settings(now, "hidden"))
    _check_scores(settings(before, "logits"), settings(now, "logits"))
    _check_scores(settings(0, "hidden"), settings(0, "hidden"))


UNITS = ("teacher.tokenizer=t", "teacher.signal=units")


@pytest.mark.parametrize(
    ("settings", "other", "key"),
    [
        (UNITS, "teacher.signal=topk", "teacher.signal"),
        (UNITS, "teacher.tokenizer=''", "teacher.tokenizer"),
        (UNITS, "teacher.special_tokens={a: b}", "teacher.special_tokens"),
        ((), "distill.support=student", "distill.support"),
        ((), "teacher.prompt_template='{prompt}'", "teacher.prompt_template"),
    ],
)
def test_lists_of_other_ids_or_prompts_are_refused(settings: tuple[str, ...], other: str, key: str) -> None:
    """Fails if recorded units are read as tokens, the teacher's tokens as the student's, or the ids of one of them as
    those of the other; or if recorded scores are used for a run whose teacher sees something else.
    """
    recorded, now = (load_config(None, ["trainer.replay=batches", *settings, *more]) for more in ((), (other,)))
    _check_scores(recorded, recorded)
    for before, after in ((recorded, now), (now, recorded)):
        with refuses(key):
            _check_scores(before, after)


def test_scores_of_another_teacher_are_refused(tmp_path: Path, recorded: Path) -> None:
    """Fails if a run with one teacher replays the recorded scores of another."""
    trainer = make(tmp_path, World(), STEPS, f"trainer.replay={recorded}")
    with refuses("teacher.server_port"):
        check_replay(trainer.config, 3, {"name": "u", "fingerprint": "g"})
