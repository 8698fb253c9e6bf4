"""A run's folder after a kill at every single operation of what changes it: the next start knows where to go on."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from gkd.errors import ConfigError
from gkd.run.folder import RunFolder
from tests.unit.kills import in_child, kill_at
from tests.unit.test_run_folder import config, open_folder, resumed_step, run_with_checkpoints, save


def killed_at_every_operation(before: Path, now: Path, work: Callable[[], object], look: Callable[[], None]) -> int:
    """`work` on a copy of `before` in `now`, killed at each of its operations on names; `look` after each. How many."""
    n = 0
    while True:
        n += 1
        shutil.rmtree(now, ignore_errors=True)
        if before.exists():
            shutil.copytree(before, now)

        def killed(n: int = n) -> None:
            kill_at(n)
            work()

        code = in_child(killed)
        assert code in (0, -signal.SIGKILL), (n, code)
        look()
        if code == 0:
            return n


def test_a_kill_at_every_operation_of_a_first_start(in_memory: Path) -> None:
    """Fails if a start that is killed leaves a folder that no later start takes."""
    run_dir = in_memory / "run"

    def look() -> None:
        assert resumed_step(open_folder(config(run_dir, "trainer.resume=auto"))) is None
        shutil.rmtree(run_dir / "checkpoints", ignore_errors=True)
        open_folder(config(run_dir))

    assert killed_at_every_operation(in_memory / "none", run_dir, lambda: open_folder(config(run_dir)), look) > 5
    (run_dir / "config.yaml").unlink()
    (run_dir / "notes.txt").touch()
    with pytest.raises(ConfigError, match="not empty"):
        open_folder(config(run_dir))


def test_a_kill_at_every_operation_of_a_branch_s_first_start(in_memory: Path) -> None:
    """Fails if `auto` begins at step 0 in a folder that is a branch's already."""
    two, *_ = run_with_checkpoints(in_memory / "run")
    run_dir, seen = in_memory / "branch", set()

    def look() -> None:
        told = (run_dir / "branched_from").exists()
        assert told or not (run_dir / "config.yaml").exists(), (
            "a run by all signs, and nobody knows that it is a branch"
        )
        step = resumed_step(open_folder(config(run_dir, "trainer.resume=auto")))
        assert step == (2 if told else None)
        seen.add(step)

    def start() -> None:
        open_folder(config(run_dir, f"trainer.resume={two}"))

    killed_at_every_operation(in_memory / "none", run_dir, start, look)
    assert seen == {2, None}


def test_going_back_is_not_forgotten(in_memory: Path) -> None:
    """Fails if a run that was told to go back, and died before it had loaded that step, goes on from the newest."""
    *_, four, _ = run_with_checkpoints(in_memory / "before")
    run_dir, seen = in_memory / "run", set()
    auto = config(run_dir, "trainer.resume=auto", "trainer.keep_last=9")

    def look() -> None:
        told = (run_dir / "going_back").exists()
        folder = open_folder(auto)
        assert resumed_step(folder) == (4 if told else 6)
        save(folder, 7)
        del folder
        assert resumed_step(open_folder(auto)) == 7, "it is gone back once"
        seen.add(told)

    def start() -> None:
        open_folder(config(run_dir, f"trainer.resume={run_dir / 'checkpoints' / four.name}", "trainer.keep_last=9"))

    killed_at_every_operation(in_memory / "before", run_dir, start, look)
    assert seen == {True, False}


def whole_export(folder: Path, text: str) -> None:
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_text(text)


def test_a_kill_at_every_operation_of_an_export_s_exchange(in_memory: Path) -> None:
    """Fails if there is a moment at which half an export, or none, is what a kill leaves for good."""
    folder = open_folder(config(in_memory / "before"))
    whole_export(folder.root / "export", "old")
    whole_export(folder.new_export, "new")
    del folder
    run_dir, seen = in_memory / "run", set()

    def texts() -> set[str]:
        return {(run_dir / "export" / name).read_text() for name in ("config.json", "model.safetensors")}

    def exchange() -> None:
        settings = config(run_dir)
        RunFolder(run_dir, settings, {}, (run_dir / ".lock").open(), None).publish_export()

    def look() -> None:
        if (run_dir / "export").exists():
            assert len(texts()) == 1, "half of it under the final name"
        open_folder(config(run_dir))
        (text,) = texts()
        assert not list(run_dir.glob(".*export*"))
        seen.add(text)

    assert killed_at_every_operation(in_memory / "before", run_dir, exchange, look) > 4
    assert seen == {"old", "new"}
