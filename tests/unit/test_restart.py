"""Test that a run whose rank failed starts again by itself: which errors, how often, and the new process image."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gkd.config.load import load_config
from gkd.config.schema import Config
from gkd.errors import ClusterError, GkdError, OutOfMemory, RankFailed, RankTimeout, TeacherUnavailable
from gkd.run import interrupts
from gkd.run.failure_policy import may_start_again

# A program with the same end as main_gkd: fails in its loop at each start.
PROGRAM = """
import os, sys
from gkd import main_gkd
from gkd.console.state import RunState
from gkd.errors import RankFailed

def run(config, closing):
    fd = os.open("leak", os.O_CREAT | os.O_WRONLY)
    print("start", os.getpid(), config.trainer.resume, os.environ.get("SET_LATER"), fd, flush=True)
    os.environ["SET_LATER"] = "1"
    if IN_LOOP:
        closing.state = RunState(2)
    raise RankFailed("train_step on actor rank 1: the process died")

main_gkd.run = run
sys.exit(main_gkd.main())
"""


def settings(tmp_path: Path, *overrides: str) -> Config:
    return load_config(None, [f"trainer.run_dir={tmp_path}", "trainer.max_restarts=1", *overrides])


@pytest.mark.parametrize(
    ("error", "again"),
    [
        (RankFailed("train_step on actor rank 1: the process died"), True),
        (RankTimeout("train_step: no answer", ["actor rank 1"]), True),
        (ClusterError("not enough GPUs"), False),
        (OutOfMemory("actor rank 0"), False),
        (TeacherUnavailable("silent"), False),
    ],
)
def test_only_failed_processes_are_a_reason(error: GkdError, again: bool, tmp_path: Path) -> None:
    """Fails if a run starts again although the same error would come again, or does not after a death."""
    interrupts.install()
    assert may_start_again(error, settings(tmp_path)) is again
    assert not may_start_again(error, settings(tmp_path, "trainer.max_restarts=0"))


def test_a_branch_without_a_checkpoint_is_not_started_from_scratch(tmp_path: Path) -> None:
    """Fails if a run that began at another run's checkpoint would start again at step 0."""
    interrupts.install()
    branch = settings(tmp_path / "branch", f"trainer.resume={tmp_path / 'run' / 'checkpoints' / 'step_4'}")
    assert not may_start_again(RankFailed("died"), branch)


def test_an_interrupted_run_stays_down(tmp_path: Path) -> None:
    """Fails if a rank that dies while the loop holds Ctrl-C starts the run again."""
    interrupts.install()
    with interrupts.training_loop():
        os.kill(os.getpid(), signal.SIGINT)  # held until the step is finished
    assert not may_start_again(RankFailed("died"), settings(tmp_path))


@pytest.mark.parametrize(("in_loop", "starts"), [(True, 2), (False, 1)])
def test_the_process_is_replaced(in_loop: bool, starts: int, tmp_path: Path) -> None:
    """Fails if a run starts again too often, before its loop, as a child, or with state of the process before."""
    (tmp_path / "program.py").write_text(PROGRAM.replace("IN_LOOP", str(in_loop)))
    (tmp_path / "mine.yaml").write_text(f"trainer: {{run_dir: {tmp_path / 'run'}, max_restarts: 1}}\n")
    command = [sys.executable, "program.py", "trainer.resume=never", "--config", "mine.yaml"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1, done.stderr
    lines = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("start ")]
    assert len(lines) == starts
    assert len({pid for pid, *_ in lines}) == 1, "the same process"
    assert [resume for _, resume, *_ in lines] == ["never", "auto"][:starts]
    assert {later for *_, later, _ in lines} == {"None"}, "the environment is that of the first start"
    assert len({fd for *_, fd in lines}) == 1, "no open file survives"
