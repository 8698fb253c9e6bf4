"""Test what `gkd.tools.replay` accepts and how it compares; `tests/e2e/test_tracing.py` replays a real step."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from gkd.tools import replay
from gkd.types import TrainStats
from tests.refusals import refuses
from tests.unit.world import World, make

RECORDED = {"loss/total": 0.5, "optim/grad_norm": 2.0, "loss/tokens": 12.0}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    settings = ("trainer.total_steps=6", "trainer.record_batches=true", "trainer.save_every=2", "trainer.keep_last=2")
    make(tmp_path, World(), *settings).fit()
    return tmp_path / "run"


@pytest.mark.parametrize(("step", "start", "first"), [(6, "step_00000004", 4), (5, "step_00000004", 4), (2, None, 0)])
def test_the_newest_checkpoint_before_the_step_is_the_start(
    run: Path, step: int, start: str | None, first: int
) -> None:
    """Fails if a replay starts from weights that have already made the step, makes more steps than necessary, or cannot
    be made on another device.
    """
    case = replay.find_case(run, step, [])
    assert (case.start.name if case.start else None, case.first) == (start, first)
    assert case.recorded[step]["loss/total"] == 1.0
    assert replay.find_case(run, step, ["trainer.device=cpu"]).config.trainer.device == "cpu"


@pytest.mark.parametrize(
    ("step", "removed", "override", "key"),
    [
        (7, "", "", "--step"),
        (0, "", "", "--step"),
        (3, "batches/step_00000002", "", "trainer.record_batches"),
        (3, "batches", "", "trainer.record_batches"),
        (6, "config.yaml", "", "RUN"),
        (6, "", "actor.optim.lr=0.5", "actor.optim.lr"),
        (6, "", "actor.no_such_key=1", "actor.no_such_key"),
    ],
)
def test_what_cannot_be_replayed_is_refused(
    run: Path, step: int, removed: str, override: str, key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fails if a replay starts processes although a batch, a step or a setting is missing, or names another cause."""
    if removed:
        shutil.rmtree(run / removed) if (run / removed).is_dir() else (run / removed).unlink()
    overrides = [override] if override else []
    with refuses(key):
        replay.find_case(run, step, overrides)
    assert replay.main([str(run), "--step", str(step), *overrides]) == 2
    assert key in capsys.readouterr().err


def test_a_branch_starts_from_the_checkpoint_it_came_from(run: Path, tmp_path: Path) -> None:
    """Fails if the first steps of a branch are replayed from model.path, or a lost origin is found only later."""
    start = run / "checkpoints" / "step_00000004"
    settings = ("trainer.total_steps=6", "trainer.record_batches=true", f"trainer.resume={start}")
    make(tmp_path / "branch", World(), *settings).fit()
    branch = tmp_path / "branch" / "run"
    (branch / "branched_from").write_text(f"{start}\n")
    assert replay.find_case(branch, 5, []).start == start
    (branch / "branched_from").write_text(f"{tmp_path / 'gone'}\n")
    with refuses("--step"):
        replay.find_case(branch, 5, [])


@pytest.mark.parametrize(
    ("loss", "norm", "tokens", "equal"),
    [
        (0.5, 2.0, 12, True),
        (0.5004, 2.0, 12, True),
        (0.501, 2.0, 12, False),
        (0.5, 2.01, 12, False),
        (0.5, 2.0, 13, False),
        (float("nan"), 2.0, 12, False),
    ],
)
def test_numbers_are_compared(loss: float, norm: float, tokens: int, equal: bool) -> None:
    """Fails if another loss, gradient or number of tokens counts as the recorded one."""
    stats = TrainStats(loss, tokens, norm)
    table, _, found = replay.compared(RECORDED, stats, rtol=1e-3)
    assert found is equal and len(table.splitlines()) == 4
    assert replay.compared(RECORDED, stats, rtol=0.0)[2] is (stats == TrainStats(0.5, 12, 2.0))
    empty = {"loss/total": None, "optim/grad_norm": None, "loss/tokens": 0.0}
    assert replay.compared(empty, TrainStats(float("nan"), 0, float("nan")), rtol=0.0)[2]
    assert not replay.compared(empty, stats, rtol=1e9)[2]
