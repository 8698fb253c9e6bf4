"""Test that the best step is saved, named, and kept by retention, with fake roles and the real checkpoint store."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from gkd.config.load import load_config
from gkd.errors import CheckpointError, TeacherUnavailable
from gkd.metrics.writer import read_metrics
from gkd.run.checkpoints import Best, BestStep
from gkd.types import GreedyReport, Prompt, ScoredChunk, TrainStats
from tests.refusals import refuses
from tests.unit.world import PROMPTS, World, checkpoints, make

SETTINGS = (
    "eval.metric=exact_match",
    "eval.every=1",
    "trainer.save_every=0",
    "trainer.keep_last=1",
    "trainer.keep_best=eval/accuracy",
)


class Learning(World):
    """A student whose accuracy at each step is given, and whose KL is 1 - the accuracy."""

    def __init__(self, *accuracies: float) -> None:
        super().__init__()
        self.accuracies = accuracies

    def greedy(self, prompts: Sequence[Prompt], *, n_samples: int) -> GreedyReport:
        return GreedyReport(self.accuracies[self.engine_version], [])

    def evaluate(self, batch: Sequence[ScoredChunk], *, keep_tokens: int = 0) -> TrainStats:
        return TrainStats(0.7, 4, extra={"loss/token_kl": 1 - self.accuracies[self.engine_version]})


def best(tmp_path: Path) -> Best:
    return Best.of_bytes((tmp_path / "run" / "checkpoints" / "best").read_bytes())


@pytest.mark.parametrize("more", [(), ("trainer.keep_best=eval/kl",)])
def test_the_best_step_is_saved_and_kept(tmp_path: Path, more: tuple[str, ...]) -> None:
    """Fails if the best step is not saved, retention deletes it, an equal one replaces it, or the untrained student
    counts.
    """
    world = Learning(0.9, 0.2, 0.6, 0.4, 0.6, 0.5, 0.3)
    make(tmp_path, world, "trainer.total_steps=6", *SETTINGS, *more, val=PROMPTS[:1]).fit()
    assert checkpoints(tmp_path) == ["best", "latest", "step_00000002", "step_00000006"]
    assert best(tmp_path).step == 2 and best(tmp_path).value == pytest.approx(0.4 if more else 0.6)
    assert world.events.count("save") == 3, "steps 1, 2 and 6"


def test_a_resumed_run_continues_with_its_best_step(tmp_path: Path) -> None:
    """Fails if a resumed run forgets its best step and deletes it, or keeps one of steps that it discards."""
    make(tmp_path, Learning(0, 0.2, 0.6, 0.4), "trainer.total_steps=3", *SETTINGS, val=PROMPTS[:1]).fit()
    more = (*SETTINGS, "trainer.keep_last=2", "trainer.resume=auto", "trainer.total_steps=5")
    make(tmp_path, Learning(0, 0, 0, 0, 0.5, 0.3), *more, val=PROMPTS[:1]).fit()
    assert best(tmp_path) == Best(2, "eval/accuracy", 0.6)
    assert checkpoints(tmp_path) == ["best", "latest", "step_00000002", "step_00000003", "step_00000005"]
    back = tmp_path / "run" / "checkpoints" / "step_00000002"
    more = (*SETTINGS, f"trainer.resume={back}", "trainer.total_steps=4")
    make(tmp_path, Learning(0, 0, 0, 0.7, 0.1), *more, val=PROMPTS[:1]).fit()
    assert best(tmp_path) == Best(3, "eval/accuracy", 0.7)
    assert checkpoints(tmp_path) == ["best", "latest", "step_00000003", "step_00000004"]


@pytest.mark.parametrize("name", ["eval/kl", "eval/reverse_kl", "eval/end_kl_share", "eval/sure_and_wrong_share"])
def test_the_best_share_of_bad_tokens_is_the_smallest(name: str) -> None:
    """Fails if the student that is most often sure of what its teacher denies is the one that is kept."""
    found = BestStep(load_config(None, ["data.val_files=[v]", f"trainer.keep_best={name}"]).trainer)
    for step, value in enumerate((0.5, 0.3, 0.1, 0.2)):
        found.add(step, {name: value})
    assert found.best == Best(2, name, 0.1)


def test_a_number_that_is_not_one_is_never_the_best() -> None:
    """Fails if an evaluation without a number keeps its step for ever."""
    found = BestStep(load_config(None, ["data.val_files=[v]", "trainer.keep_best=eval/accuracy"]).trainer)
    for step, value in enumerate((0.9, float("nan"), 0.1, float("nan"))):
        found.add(step, {"eval/accuracy": value})
    assert found.best == Best(2, "eval/accuracy", 0.1)


@pytest.mark.parametrize("rewinds", [False, True])
def test_best_does_not_outlive_its_checkpoint(tmp_path: Path, rewinds: bool) -> None:
    """Fails if checkpoints/best names a deleted step after keep_best is switched off, or a discarded one."""
    settings = (*SETTINGS, "trainer.save_every=1", "trainer.keep_last=2")
    make(tmp_path, Learning(0, 0.2, 0.6), "trainer.total_steps=2", *settings, val=PROMPTS[:1]).fit()
    assert best(tmp_path).step == 2
    if rewinds:
        more = [f"trainer.resume={tmp_path / 'run' / 'checkpoints' / 'step_00000001'}", "trainer.total_steps=1"]
    else:
        more = ["trainer.resume=auto", "trainer.keep_best=", "trainer.total_steps=5"]
    make(tmp_path, Learning(*[0.0] * 9), *settings, *more, val=PROMPTS[:1]).fit()
    assert "best" not in checkpoints(tmp_path)


class Interrupted(Learning):
    """Its teacher is lost in the evaluation of step 2."""

    def evaluate(self, batch: Sequence[ScoredChunk], *, keep_tokens: int = 0) -> TrainStats:
        if self.engine_version == 2:
            raise TeacherUnavailable("gone")
        return super().evaluate(batch, keep_tokens=keep_tokens)


@pytest.mark.parametrize("total_steps", [2, 5])
def test_a_step_whose_evaluation_was_interrupted_can_be_the_best_one(tmp_path: Path, total_steps: int) -> None:
    """Fails if a resumed run leaves out the evaluation in which it stopped, so that a worse step is the best one.

    Or if it does not name the step because it is saved already, or evaluates a step twice.
    """
    accuracies, settings = (0, 0.2, 0.9, 0.3, 0.1, 0.1), (*SETTINGS, f"trainer.total_steps={total_steps}")
    with pytest.raises(TeacherUnavailable):
        make(tmp_path, Interrupted(*accuracies), *settings, val=PROMPTS[:1]).fit()
    for _ in range(2):
        make(tmp_path, Learning(*accuracies), *settings, "trainer.resume=auto", val=PROMPTS[:1]).fit()
        assert best(tmp_path) == Best(2, "eval/accuracy", 0.9)
        assert "step_00000002" in checkpoints(tmp_path)
        lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
        assert [line["step"] for line in lines if "eval/accuracy" in line] == list(range(total_steps + 1))


def test_a_branch_does_not_repeat_the_evaluation_of_its_step(tmp_path: Path) -> None:
    """Fails if each branch begins with an evaluation that the run it left has made."""
    make(tmp_path, Learning(0, 0.2, 0.6, 0.4), "trainer.total_steps=2", *SETTINGS, val=PROMPTS[:1]).fit()
    start = tmp_path / "run" / "checkpoints" / "step_00000002"
    more = (*SETTINGS, f"trainer.resume={start}", "trainer.total_steps=3")
    make(tmp_path / "branch", Learning(0, 0, 0, 0.4), *more, val=PROMPTS[:1]).fit()
    lines = read_metrics(tmp_path / "branch" / "run" / "metrics.jsonl")
    assert [line["step"] for line in lines if "eval/accuracy" in line] == [3]


def test_another_number_starts_anew(tmp_path: Path) -> None:
    """Fails if values of different numbers are compared with each other."""
    make(tmp_path, Learning(0, 0.2, 0.6), "trainer.total_steps=2", *SETTINGS, val=PROMPTS[:1]).fit()
    more = (*SETTINGS, "trainer.keep_best=eval/kl", "trainer.resume=auto")
    make(tmp_path, Learning(0, 0, 0, 0.1, 0.05), *more, "trainer.total_steps=4", val=PROMPTS[:1]).fit()
    assert best(tmp_path) == Best(3, "eval/kl", 0.9)


@pytest.mark.parametrize("change", ["eval.max_prompts=7", "eval.answer_marker=A:", "eval.metric=math_verify"])
def test_a_best_step_of_other_evaluations_is_not_compared(tmp_path: Path, change: str) -> None:
    """Fails if an easy metric's number of before a resume hides every later step, so that the best is never saved."""
    make(tmp_path, Learning(0, 0.2, 0.9), "trainer.total_steps=2", *SETTINGS, val=PROMPTS[:1]).fit()
    more = (*SETTINGS, "trainer.resume=auto", change)
    make(tmp_path, Learning(0, 0, 0, 0.4, 0.3), *more, "trainer.total_steps=4", val=PROMPTS[:1]).fit()
    assert best(tmp_path) == Best(3, "eval/accuracy", 0.4)
    make(tmp_path, Learning(0, 0, 0, 0, 0, 0.1), *more, "trainer.total_steps=5", val=PROMPTS[:1]).fit()
    assert best(tmp_path) == Best(3, "eval/accuracy", 0.4), "the same evaluations"


def test_a_number_that_no_evaluation_has_is_refused(tmp_path: Path) -> None:
    """Fails if a typing error keeps nothing, silently."""
    world = Learning(0, 0.2)
    settings = ("trainer.total_steps=1", *SETTINGS, "trainer.keep_best=eval/acuracy")
    with refuses("trainer.keep_best"):
        make(tmp_path, world, *settings, val=PROMPTS[:1]).fit()
    assert "train" not in world.events


@pytest.mark.parametrize("data", [b"", b"{}", b"[1]", b'{"step": 1}'])
def test_a_damaged_file_is_refused(data: bytes) -> None:
    """Fails if a damaged file crashes the run with another error."""
    with pytest.raises(CheckpointError):
        Best.of_bytes(data)
