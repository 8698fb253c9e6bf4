"""Test that the best step is saved, named, and kept by retention, with fake roles and the real checkpoint store."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from gkd.errors import CheckpointError
from gkd.run.checkpoints import Best
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


def test_another_number_starts_anew(tmp_path: Path) -> None:
    """Fails if values of different numbers are compared with each other."""
    make(tmp_path, Learning(0, 0.2, 0.6), "trainer.total_steps=2", *SETTINGS, val=PROMPTS[:1]).fit()
    more = (*SETTINGS, "trainer.keep_best=eval/kl", "trainer.resume=auto")
    make(tmp_path, Learning(0, 0, 0, 0.1, 0.05), *more, "trainer.total_steps=4", val=PROMPTS[:1]).fit()
    assert best(tmp_path) == Best(3, "eval/kl", 0.9)


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
