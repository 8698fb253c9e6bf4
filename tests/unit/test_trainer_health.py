"""Test health.on_alarm in the training loop, with the fakes of `tests.unit.world`."""

from __future__ import annotations

import logging
import math
import os
import signal
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from gkd.errors import DataError, HealthAlarm
from gkd.metrics import health
from gkd.metrics.writer import read_metrics
from gkd.trainer import Trainer
from gkd.types import ScoredChunk, TrainStats
from tests.processes import wait_until
from tests.unit.world import World, checkpoints, make

SICK_FROM = 3  # first step whose responses repeat themselves; the alarm is at this step


class LoopingWorld(World):
    """A student whose responses are loops from one step on."""

    def train_step(self, batch: Sequence[ScoredChunk]) -> TrainStats:
        loops = 1.5 * (self.engine_version + 1 >= SICK_FROM)
        return replace(super().train_step(batch), extra={"rollout/repeated_4gram_share": loops})


def numbers(folder: Path) -> list[float | None]:
    return [line.get("health/repetition") for line in read_metrics(folder / "run" / "metrics.jsonl")]


def alarms(trainer: Trainer) -> tuple[str, ...]:
    """Return the checks that stop a run; keeps no frame of it, so that its folder is free again."""
    try:
        trainer.fit()
    except HealthAlarm as error:
        return error.checks
    return ()


def test_warn_logs_each_alarm_once_and_trains_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Fails if an alarm ends the run by default, is logged at every step, or lacks its evidence or the key."""
    make(tmp_path, LoopingWorld(), "trainer.total_steps=6").fit()
    assert numbers(tmp_path) == [None, None, 1.0, 1.0, 1.0, 1.0]
    warned = [r.getMessage() for r in caplog.records if r.name == "gkd.health" and r.levelno == logging.WARNING]
    assert len(warned) == 1 and "actor.optim.lr" in warned[0] and "0.5" in warned[0]


def test_stop_saves_the_step_and_names_the_alarm(tmp_path: Path) -> None:
    """Fails if the step of the alarm is lost, or the run cannot be continued past its alarm."""
    settings = ("trainer.total_steps=6", "health.on_alarm=stop")
    assert alarms(make(tmp_path, LoopingWorld(), *settings)) == ("repetition",)
    assert checkpoints(tmp_path) == ["latest", "step_00000003"] and not (tmp_path / "run" / "export").exists()
    world = LoopingWorld()
    make(tmp_path, world, *settings, "trainer.resume=auto").fit()
    assert len(world.trained) == 3 and numbers(tmp_path) == [None, None, 1.0, 1.0, 1.0, 1.0]
    assert (tmp_path / "run" / "export").exists()


def test_pause_waits_for_the_users_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if the loop does not wait, waits without a saved step, or accepts an old file."""
    world, saved = LoopingWorld(), list[list[str]]()
    file = tmp_path / "run" / health.CONTINUE

    def sleep(seconds: float) -> None:
        assert not file.exists() and world.events[-1] == "saved 3"
        saved.append(checkpoints(tmp_path))
        if len(saved) == 3:
            file.touch()

    monkeypatch.setattr(health, "sleep", sleep)
    trainer = make(tmp_path, world, "trainer.total_steps=4", "health.on_alarm=pause")
    file.touch()  # of an earlier pause
    trainer.fit()
    assert saved == [["latest", "step_00000003"]] * 3 and not file.exists()
    assert len(world.trained) == 4
    assert len([r for r in caplog.records if r.name == "gkd.health" and str(file) in r.getMessage()]) == 1


def test_an_interrupt_ends_a_pause(tmp_path: Path, gkd_log: pytest.LogCaptureFixture) -> None:
    """Fails if Ctrl-C has no effect during a pause, or the paused step cannot be resumed."""

    def interrupt() -> None:
        wait_until(lambda: "paused by" in gkd_log.text, 20.0, "the pause")
        os.kill(os.getpid(), signal.SIGINT)

    with ThreadPoolExecutor(1) as threads, pytest.raises(KeyboardInterrupt):
        threads.submit(interrupt)
        make(tmp_path, LoopingWorld(), "trainer.total_steps=4", "health.on_alarm=pause").fit()
    assert checkpoints(tmp_path) == ["latest", "step_00000003"]
    make(tmp_path, LoopingWorld(), "trainer.total_steps=4", "health.on_alarm=pause", "trainer.resume=auto").fit()
    assert numbers(tmp_path) == [None, None, 1.0, 1.0]


def test_checks_that_are_off_write_nothing(tmp_path: Path) -> None:
    """Fails if health.limits is not read by the loop."""
    settings = ("trainer.total_steps=4", "health.on_alarm=stop", "health.limits={repetition: 0}")
    make(tmp_path, LoopingWorld(), *settings).fit()
    assert numbers(tmp_path) == [None] * 4


class ShortWorld(World):
    """A student whose answers of 8 tokens are all left out by distill.skip_first_tokens in some steps."""

    def __init__(self, short: Iterable[int]) -> None:
        super().__init__()
        self.short = set(short)

    def train_step(self, batch: Sequence[ScoredChunk]) -> TrainStats:
        stats = super().train_step(batch)
        return TrainStats(math.nan, 0, math.nan, 0.01) if self.engine_version + 1 in self.short else stats


def test_a_batch_without_a_loss_token_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Fails if a batch of short answers ends the run, its line looks like a step, or a resume takes other prompts."""
    settings = ("trainer.total_steps=5", "trainer.scheduler=two_step_off", "distill.skip_first_tokens=8")
    world, resumed = ShortWorld({2, 3}), ShortWorld({2, 3})
    make(tmp_path, world, *settings, "trainer.save_every=1", "trainer.keep_last=9").fit()
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [(line["loss/total"], line["loss/tokens"]) for line in lines[1:4]] == [(None, 0), (None, 0), (1.0, 4)]
    assert [line["rollout/no_loss_sequences"] for line in lines] == [2.0] * 5
    warned = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert sum("2 answers of at most 8 tokens" in text for text in warned) == 2 and len(warned) == 3
    start = tmp_path / "run" / "checkpoints" / "step_00000001"
    make(tmp_path / "resumed", resumed, *settings, f"trainer.resume={start}").fit()
    assert resumed.trained == world.trained[1:]


def test_a_run_whose_batches_never_have_a_loss_token_ends(tmp_path: Path) -> None:
    """Fails if a run that trains on nothing goes on to its end, or cannot be resumed behind such batches."""
    settings = ("trainer.total_steps=30", "trainer.save_every=0", "distill.skip_first_tokens=8")
    with pytest.raises(DataError, match=r"distill\.skip_first_tokens = 8"):
        make(tmp_path, ShortWorld(range(4, 31)), *settings).fit()
    assert checkpoints(tmp_path) == ["latest", "step_00000023"]
    again = ShortWorld(range(4, 20))
    make(tmp_path, again, *settings, "trainer.resume=auto").fit()
    assert len(again.trained) == 7
    with pytest.raises(DataError):  # also in a run of fewer batches
        make(tmp_path / "few", ShortWorld(range(9)), "trainer.total_steps=3", "distill.skip_first_tokens=8").fit()
