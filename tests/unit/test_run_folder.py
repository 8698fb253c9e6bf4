"""A run's folder: never overwritten, checkpoints whole or absent."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gkd.config import Config
from gkd.config_check import all_keys
from gkd.config_load import load_config
from gkd.errors import CheckpointError, ConfigError
from gkd.roles import TokenRecord
from gkd.run_folder import _FREE_IF_CONSTANT, _FREE_ON_RESUME, RunFolder, TrainerState, open_run_folder


def config(run_dir: Path, *overrides: str) -> Config:
    base = ["data.train_files=[a]", "model.path=m", f"trainer.run_dir={run_dir}"]
    return load_config(None, [*base, *overrides])


def _open(settings: Config, fingerprint: str = "abc") -> RunFolder:
    return open_run_folder(settings, {"name": "teacher", "fingerprint": fingerprint})


def write_actor(folder: Path) -> None:
    folder.mkdir()
    (folder / "weights").write_text("w")


def test_a_folder_with_a_run_is_refused_or_resumed(tmp_path: Path) -> None:
    """If it fails, a second run overwrites the first, or resumes with other settings unnoticed."""
    run_dir = tmp_path / "run"
    _open(config(run_dir, "actor.optim.lr=0.5"))
    _open(config(run_dir))  # nothing had come of the first one yet: its wrong config may be corrected
    (run_dir / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(ConfigError, match="resume=auto") as caught:
        _open(config(run_dir))
    assert caught.value.key == "trainer.run_dir"
    _open(config(run_dir, "trainer.resume=auto", "trainer.total_steps=9", "teacher.server_port=1"))
    with pytest.raises(ConfigError, match="started with 1e-06") as caught:
        _open(config(run_dir, "trainer.resume=auto", "actor.optim.lr=0.1"))
    assert caught.value.key == "actor.optim.lr"
    with pytest.raises(ConfigError, match="scored by teacher"):
        _open(config(run_dir, "trainer.resume=auto"), fingerprint="other")


def test_the_end_of_the_run_is_free_only_where_it_changes_nothing(tmp_path: Path) -> None:
    """If it fails, a resumed run trains its remaining steps at learning rates of another schedule."""
    run_dir = tmp_path / "run"
    settings = ("actor.optim.schedule=cosine", "trainer.resume=auto")
    _open(config(run_dir, *settings))
    (run_dir / "checkpoints" / "step_00000001").mkdir(parents=True)
    _open(config(run_dir, *settings))
    with pytest.raises(ConfigError) as caught:
        _open(config(run_dir, *settings, "trainer.total_steps=9"))
    assert caught.value.key == "trainer.total_steps"


def test_two_live_runs_never_share_a_folder(tmp_path: Path) -> None:
    """If it fails, a second start of the same command mixes its metrics and checkpoints with the first's."""
    first = _open(config(tmp_path / "run"))
    with pytest.raises(ConfigError, match="right now"):
        _open(config(tmp_path / "run"))
    del first
    _open(config(tmp_path / "run"))


def test_a_damaged_teacher_file_is_named(tmp_path: Path) -> None:
    """If it fails, a resume ends in a parser's traceback."""
    folder = _open(config(tmp_path / "run"))
    folder.metrics_file.write_text("{}\n")
    (tmp_path / "run" / "teacher.json").write_text("{")
    del folder
    with pytest.raises(ConfigError, match=r"teacher\.json"):
        _open(config(tmp_path / "run", "trainer.resume=auto"))


def test_the_free_keys_are_real_keys() -> None:
    """If it fails, a renamed key silently became one that a resume must not change."""
    assert all_keys() >= _FREE_ON_RESUME | _FREE_IF_CONSTANT


def test_a_foreign_folder_is_refused(tmp_path: Path) -> None:
    """If it fails, a run writes into a folder of other files."""
    (tmp_path / "x").write_text("mine")
    with pytest.raises(ConfigError, match="not empty"):
        _open(config(tmp_path))
    other = tmp_path / "other_tool"
    other.mkdir()
    (other / "config.yaml").write_text("theirs")
    with pytest.raises(ConfigError, match="not empty"):
        _open(config(other))
    assert (other / "config.yaml").read_text() == "theirs"
    with pytest.raises(ConfigError, match="it is a file"):
        _open(config(tmp_path / "x"))
    with pytest.raises(ConfigError, match="cannot be written"):
        _open(config(tmp_path / "x" / "y"))


def test_the_newest_whole_checkpoint_is_found(tmp_path: Path) -> None:
    """If it fails, a resume starts from an older state, or from one whose writing was interrupted."""
    folder = _open(config(tmp_path / "run"))
    assert folder.newest_checkpoint() is None
    for step in (2, 10):
        folder.save_checkpoint(TrainerState(step, step * 6), write_actor, keep_last=9)
    (folder.checkpoints / ".tmp_step_00000012").mkdir()
    found = folder.newest_checkpoint()
    assert found is not None
    assert found[0] == TrainerState(10, 60)
    assert (found[1] / "weights").read_text() == "w"
    assert load_config(found[1].parent / "config.yaml") == folder.config


def test_a_failed_save_keeps_the_older_checkpoints(tmp_path: Path) -> None:
    """If it fails, a full disk costs the checkpoint that could still be resumed from."""
    folder = _open(config(tmp_path / "run"))
    folder.save_checkpoint(TrainerState(1, 6), write_actor, keep_last=1)

    def full_disk(path: Path) -> None:
        write_actor(path)
        raise OSError(28, "No space left on device")

    with pytest.raises(CheckpointError, match="No space left"):
        folder.save_checkpoint(TrainerState(2, 12), full_disk, keep_last=1)
    found = folder.newest_checkpoint()
    assert found is not None and found[0].step == 1
    folder.save_checkpoint(TrainerState(2, 12), write_actor, keep_last=1)
    assert [p.name for p in folder.checkpoints.iterdir()] == ["step_00000002"]


def test_a_damaged_state_is_named(tmp_path: Path) -> None:
    """If it fails, a damaged checkpoint is an unexplained crash."""
    folder = _open(config(tmp_path / "run"))
    path = folder.save_checkpoint(TrainerState(1, 6), write_actor, keep_last=1)
    for text in ("{", json.dumps({"step": 1})):
        (path / "trainer.json").write_text(text)
        with pytest.raises(CheckpointError, match="step_00000001"):
            folder.newest_checkpoint()


def test_an_infinite_token_loss_is_still_json(tmp_path: Path) -> None:
    """If it fails, the lines that people want to look at most are those that no JSON reader takes."""
    folder = _open(config(tmp_path / "run"))
    folder.write_token_losses(3, [TokenRecord(7, 0, [5, 6], {"total": [0.5, float("inf")]})])
    (line,) = (tmp_path / "run" / "token_losses" / "step_00000003.jsonl").read_text().splitlines()
    wanted = {"prompt_id": 7, "sample_index": 0, "response_ids": [5, 6], "values": {"total": [0.5, None]}}
    assert json.loads(line, parse_constant=pytest.fail) == wanted
