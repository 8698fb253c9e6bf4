"""Test that a run resumes correctly after a kill before any file operation that changes its folder."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable
from pathlib import Path

from gkd.run.folder import RunFolder
from tests.refusals import refuses
from tests.unit.kills import in_child, kill_at
from tests.unit.test_run_folder import config, open_folder, resumed_step, run_with_checkpoints, save


def kill_at_every_operation(before: Path, now: Path, work: Callable[[], object], look: Callable[[], None]) -> int:
    """Run `work` on a copy of `before` in `now`, killed before its n-th file operation for n = 1, 2, ...

    Call `look` after each. Return the number of runs: the last one was not killed.
    """
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
    """Fails if a killed start leaves a folder that later starts refuse."""
    run_dir = in_memory / "run"

    def look() -> None:
        assert resumed_step(open_folder(config(run_dir, "trainer.resume=auto"))) is None
        shutil.rmtree(run_dir / "checkpoints", ignore_errors=True)
        open_folder(config(run_dir))

    assert kill_at_every_operation(in_memory / "none", run_dir, lambda: open_folder(config(run_dir)), look) > 5
    (run_dir / "config.yaml").unlink()
    (run_dir / "notes.txt").touch()
    with refuses("trainer.run_dir"):
        open_folder(config(run_dir))


def test_a_kill_at_every_operation_of_a_branch_s_first_start(in_memory: Path) -> None:
    """Fails if `auto` starts at step 0 in the folder of a branch."""
    two, *_ = run_with_checkpoints(in_memory / "run")
    run_dir, seen = in_memory / "branch", set()

    def look() -> None:
        recorded = (run_dir / "branched_from").exists()
        assert recorded or not (run_dir / "config.yaml").exists(), (
            "the folder of a run without the record that it is a branch"
        )
        step = resumed_step(open_folder(config(run_dir, "trainer.resume=auto")))
        assert step == (2 if recorded else None)
        seen.add(step)

    def start() -> None:
        open_folder(config(run_dir, f"trainer.resume={two}"))

    kill_at_every_operation(in_memory / "none", run_dir, start, look)
    assert seen == {2, None}


def test_a_kill_at_every_operation_of_a_rewind(in_memory: Path) -> None:
    """Fails if a run that died before it loaded the rewind's checkpoint resumes from the newest one."""
    *_, four, _ = run_with_checkpoints(in_memory / "before")
    run_dir, seen = in_memory / "run", set()
    auto = config(run_dir, "trainer.resume=auto", "trainer.keep_last=9")

    def look() -> None:
        recorded = (run_dir / "going_back").exists()
        folder = open_folder(auto)
        assert resumed_step(folder) == (4 if recorded else 6)
        save(folder, 7)
        del folder
        assert resumed_step(open_folder(auto)) == 7, "a rewind happens once"
        seen.add(recorded)

    def start() -> None:
        open_folder(config(run_dir, f"trainer.resume={run_dir / 'checkpoints' / four.name}", "trainer.keep_last=9"))

    kill_at_every_operation(in_memory / "before", run_dir, start, look)
    assert seen == {True, False}


def write_export(folder: Path, text: str) -> None:
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_text(text)


def test_a_kill_at_every_operation_of_an_export_replacement(in_memory: Path) -> None:
    """Fails if a kill can leave an incomplete export or none."""
    folder = open_folder(config(in_memory / "before"))
    write_export(folder.root / "export", "old")
    write_export(folder.new_export, "new")
    del folder
    run_dir, seen = in_memory / "run", set()

    def texts() -> set[str]:
        return {(run_dir / "export" / name).read_text() for name in ("config.json", "model.safetensors")}

    def exchange() -> None:
        settings = config(run_dir)
        RunFolder(run_dir, settings, {}, (run_dir / ".lock").open(), None).publish_export()

    def look() -> None:
        if (run_dir / "export").exists():
            assert len(texts()) == 1, "an incomplete export under the final name"
        open_folder(config(run_dir))
        (text,) = texts()
        assert not list(run_dir.glob(".*export*"))
        seen.add(text)

    assert kill_at_every_operation(in_memory / "before", run_dir, exchange, look) > 4
    assert seen == {"old", "new"}
