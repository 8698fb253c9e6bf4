"""Test which checkpoints and exports remain after each kind of error, with the fakes of `tests.unit.world`."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gkd.errors import CheckpointError, ClusterError, EngineFailed, ModelError, RankTimeout, TeacherUnavailable
from gkd.metrics.writer import read_metrics
from gkd.run.failure_policy import LAST_SAVE_WAIT_S
from gkd.types import EngineRestarts, GreedyReport, Prompt, RolloutChunk, ScoredChunk, TrainStats
from tests.unit.world import PROMPTS, World, checkpoints, make


def test_a_pending_save_finishes_before_the_run_ends(tmp_path: Path) -> None:
    """Fails if an unexpected error discards a pending save, or a hung rank blocks the end of the run."""
    for error, at, wait_s in ((ClusterError, "rank_dies_at", LAST_SAVE_WAIT_S), (RuntimeError, "bug_at", None)):
        world = World(polls_per_save=9, **{at: 2})
        with pytest.raises(error):
            make(tmp_path / error.__name__, world, "trainer.total_steps=9", "trainer.save_every=2").fit()
        assert world.waits_s == [wait_s if wait_s is None else pytest.approx(wait_s, abs=1)]
        assert checkpoints(tmp_path / error.__name__) == ["latest", "step_00000002"]


class Hung(World):
    """Its third step does not end in time."""

    def train_step(self, batch: Sequence[ScoredChunk]) -> TrainStats:
        if len(self.trained) == 2:
            raise RankTimeout("train_step: no answer", ["actor rank 1"])
        return super().train_step(batch)


def test_hung_ranks_are_diagnosed_before_the_pending_save(tmp_path: Path) -> None:
    """Fails if hung ranks are diagnosed only after the wait for a pending save, when their stacks are gone."""
    world = Hung(polls_per_save=9)
    order: list[str] = []

    def diagnose(error: RankTimeout) -> RankTimeout:
        order.append(f"diagnosed {error.late} {world.waits_s}")
        return RankTimeout(f"{error}\n  actor rank 1 hangs", error.late, diagnosed=True)

    trainer = make(tmp_path, world, "trainer.total_steps=9", "trainer.save_every=2")
    trainer.roles = replace(trainer.roles, diagnose_hang=diagnose)
    with pytest.raises(RankTimeout) as raised:
        trainer.fit()
    assert order == ["diagnosed ('actor rank 1',) []"] and raised.value.diagnosed
    assert world.waits_s == [pytest.approx(LAST_SAVE_WAIT_S, abs=1)]


def test_an_unwritable_file_is_named_in_the_error(tmp_path: Path) -> None:
    """Fails if a full disk raises an unrelated error, or discards the pending save."""
    world = World(polls_per_save=9)
    settings = ("trainer.total_steps=9", "trainer.save_every=2", "eval.every=3")
    trainer = make(tmp_path, world, *settings, val=PROMPTS[:1])
    (tmp_path / "run" / "samples").mkdir()
    (tmp_path / "run" / "samples" / ".tmp_step_00000003.jsonl").mkdir()
    # The blocking folder would be deleted.
    trainer.folder.forget_after = lambda step: None  # type: ignore[method-assign]
    with pytest.raises(CheckpointError):
        trainer.fit()
    assert checkpoints(tmp_path) == ["latest", "step_00000002"]
    assert [line["step"] for line in read_metrics(tmp_path / "run" / "metrics.jsonl")] == [0, 1, 2, 3]


def test_the_error_is_logged_before_the_wait_for_a_pending_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Fails if the log stays silent while the loop waits for a pending save, or reports the failed save first."""
    world = World(polls_per_save=9, rank_dies_at=2, save_hangs=True)
    with pytest.raises(ClusterError, match="actor rank 1"):
        make(tmp_path, world, "trainer.total_steps=9", "trainer.save_every=2").fit()
    logged = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert "actor rank 1" in logged[0] and "save" not in logged[0] and "save" in logged[1]


@pytest.mark.parametrize(("dies_at", "failures", "left"), [(3, 99, 3), (2, 1, 2)])
def test_the_save_after_a_teacher_failure_is_independent_of_the_previous_save(
    tmp_path: Path, dies_at: int, failures: int, left: int
) -> None:
    """Fails if a failed background save prevents the save of the last step, or is taken for it."""
    world = World(polls_per_save=9, save_fails_at=2, save_failures=failures, teacher_dies_at=dies_at)
    with pytest.raises(TeacherUnavailable):
        make(tmp_path, world, "trainer.total_steps=9", "trainer.save_every=2").fit()
    assert checkpoints(tmp_path) == ["latest", f"step_{left:08d}"]


def exported(tmp_path: Path) -> str:
    assert not list((tmp_path / "run").glob(".trash_export"))
    return (tmp_path / "run" / "export" / "of_version").read_text()


def test_the_student_is_exported_even_if_its_last_save_fails(tmp_path: Path) -> None:
    """Fails if a run whose last save failed exports no student, or reports success."""
    for name, export_fails in (("a", False), ("b", True)):
        world = World(save_fails_at=2, export_fails=export_fails)
        with pytest.raises(CheckpointError):
            make(tmp_path / name, world, "trainer.total_steps=2").fit()
        assert (tmp_path / name / "run" / "export").exists() != export_fails
    assert exported(tmp_path / "a") == "2"


def test_an_export_replaces_the_previous_one(tmp_path: Path) -> None:
    """Fails if a continued run keeps its old export, or a failed new export deletes the old one."""
    make(tmp_path, World(), "trainer.total_steps=1").fit()
    world = World(export_fails=True)
    with pytest.raises(ModelError):
        make(tmp_path, world, "trainer.total_steps=2", "trainer.resume=auto").fit()
    assert exported(tmp_path) == "1"
    make(tmp_path, World(), "trainer.total_steps=3", "trainer.resume=auto").fit()
    assert exported(tmp_path) == "3"
    assert not list((tmp_path / "run").glob(".*export*"))


def test_a_branch_without_remaining_steps_saves_its_own_checkpoint(tmp_path: Path) -> None:
    """Fails if such a branch cannot be resumed after the original run is deleted."""
    make(tmp_path, World(), "trainer.total_steps=2").fit()
    two = tmp_path / "run" / "checkpoints" / "step_00000002"
    make(tmp_path / "branch", World(), "trainer.total_steps=2", f"trainer.resume={two}").fit()
    assert checkpoints(tmp_path / "branch") == ["latest", "step_00000002"]
    again = World()
    make(tmp_path, again, "trainer.total_steps=2", "trainer.resume=auto").fit()
    assert "save" not in again.events, "the run has its own checkpoint"


def test_metrics_are_flushed_before_each_save(tmp_path: Path, flushed: list[tuple[Path, int]]) -> None:
    """Fails if a power loss can leave a checkpoint whose steps have no line in metrics.jsonl."""
    file = tmp_path / "run" / "metrics.jsonl"

    class Saving(World):
        def save(self, folder: Path, *, blocking: bool = False) -> None:
            size = next(size for path, size in reversed(flushed) if path == file)
            assert size == file.stat().st_size and read_metrics(file)[-1]["step"] == self.engine_version
            super().save(folder, blocking=blocking)

    world = Saving()
    make(tmp_path, world, "trainer.total_steps=2", "trainer.save_every=1").fit()
    assert world.events.count("save") == 2


@pytest.mark.parametrize(
    ("scheduler", "fails_at"), [("sync", 1), ("sync", 3), ("one_step_off", 3), ("two_step_off", 1), ("two_step_off", 5)]
)
def test_a_failed_engine_leaves_a_checkpoint_of_the_last_step(scheduler: str, fails_at: int, tmp_path: Path) -> None:
    """Fails if an engine that failed for good costs finished steps, or the resumed run loses or repeats a prompt."""

    class Failing(World):
        def generate(self, *args: Any, **kwargs: Any) -> Iterator[RolloutChunk]:
            if len(self.prompt_indices) + 1 >= fails_at:
                raise EngineFailed("rollout engine 0 (host, GPU 3) failed 2 times")
            yield from super().generate(*args, **kwargs)

    world, again = Failing(), World()
    settings = ("trainer.total_steps=6", f"trainer.scheduler={scheduler}")
    with pytest.raises(EngineFailed):
        make(tmp_path, world, *settings).fit()
    n_done = len(world.trained)
    assert n_done == fails_at - 1
    assert n_done == 0 or checkpoints(tmp_path) == ["latest", f"step_{n_done:08d}"]
    assert [line["step"] for line in read_metrics(tmp_path / "run" / "metrics.jsonl")] == list(range(1, n_done + 1))
    # In a copy: the error, which a batch keeps, holds the lock of the run folder.
    shutil.copytree(tmp_path / "run", tmp_path / "copy" / "run")
    make(tmp_path / "copy", again, *settings, "trainer.resume=auto").fit()
    whole = World()
    make(tmp_path / "whole", whole, *settings).fit()
    assert world.trained + again.trained == whole.trained


def test_restarts_of_engines_are_counted_once(tmp_path: Path) -> None:
    """Fails if restarted engines are missing in the metrics, or those of an evaluation are."""

    class Restarting(World):
        def greedy(self, prompts: Sequence[Prompt], *, n_samples: int) -> GreedyReport:
            self.restarts = EngineRestarts(1, 2.5, 3)
            return super().greedy(prompts, n_samples=n_samples)

    make(tmp_path, Restarting(), "trainer.total_steps=3", "eval.every=2", val=PROMPTS[:1]).fit()
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    names = ("perf/engine_restarts", "perf/engine_recovery_s", "perf/prompts_regenerated")
    counted = [tuple(line[name] for name in names) for line in lines if names[0] in line]
    assert counted == [(1.0, 2.5, 3.0), (0.0, 0.0, 0.0), (1.0, 2.5, 3.0)]
