"""Test engines that die or hang at chosen points of a run. Random ones: `python -m tests.e2e.engine_kills`."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from gkd.metrics.writer import read_metrics
from tests.e2e.conftest import N_TRAIN, Lab
from tests.e2e.engine_kills import is_engine
from tests.e2e.exactness import check_taken, differences
from tests.e2e.killed_main import Fault, generation_of, with_faults
from tests.e2e.test_loop import interrupt, start, wait_for_step
from tests.processes import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

N_STEPS = 4
RECORD = "trainer.record_batches=true"
MANY = "rollout.max_restarts=9"


def run_with(
    faults: list[Fault], lab: Lab, run_dir: Path, port: int, *settings: str
) -> subprocess.CompletedProcess[str]:
    command = with_faults(lab.command(run_dir, port, *settings), faults)
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    wait_until(lambda: not left_behind(run_dir), 20.0, "the end of all processes")
    return done


def left_behind(run_dir: Path) -> list[str]:
    """Return the commands of processes that name the run."""
    found = [" ".join(p.info["cmdline"] or ()) for p in psutil.process_iter(["cmdline"])]
    return [text for text in found if str(run_dir) in text]


def n_restarts(run_dir: Path) -> float:
    return sum(line.get("perf/engine_restarts", 0) for line in read_metrics(run_dir / "metrics.jsonl"))


def survived(faults: list[Fault], lab: Lab, name: str, port: int, *settings: str) -> Path:
    """Run with faults after which an engine starts again; assert that all of them happened. Return the run folder."""
    run_dir = lab.root / name
    done = run_with(faults, lab, run_dir, port, RECORD, MANY, "weight_sync.verify=always", *settings)
    assert done.returncode == 0, done.stderr[-4000:]
    assert n_restarts(run_dir) == len(faults)
    check_taken(run_dir, n_steps=N_STEPS, n_prompts=N_TRAIN)
    return run_dir


def differs(base: Path, run: Path) -> list[str]:
    """Return the differences of losses and exported weights, without loss/engine_kl.

    It compares the engines' logprobs, whose rounding depends on the sequences that shared a pass.
    """
    found = [text for text in differences(base, run) if "loss/engine_kl" not in text]
    return [text for text in found if " loss/" in text or not text.startswith("step ")]


def test_the_only_engine_dies_in_a_sync_and_an_evaluation_and_hangs_in_a_batch(
    base_run: Path, lab: Lab, teacher_port: int
) -> None:
    """Fails if a run without any other engine does not wait for the new one, or trains on other tokens after it."""
    settings = ("rollout.hang_timeout_s=10", "trainer.save_every=2", "trainer.keep_last=9")
    evaluated = ("eval.every=2", "eval.max_prompts=6")
    faults: list[Fault] = [
        ("weight_sync", 2, 0.0, "engine"),  # after the first step
        ("eval", 2, 0.0, "engine"),  # after the second one
        ("rollout", generation_of(3), 0.0, "stopped_engine"),
    ]
    assert not differs(base_run, survived(faults, lab, "engine_faults", teacher_port, *settings, *evaluated))


def test_a_colocated_engine_dies_awake_and_asleep(base_run: Path, lab: Lab, teacher_port: int) -> None:
    """Fails if an engine that shares its slot with the actor is started while the actor has the memory, comes back
    asleep, or without the weights.
    """
    settings = ("trainer.colocate=true", "trainer.save_every=2", "trainer.keep_last=9")
    faults: list[Fault] = [("rollout", generation_of(2), 0.0, "engine"), ("train", 3, 0.0, "engine")]
    assert not differs(base_run, survived(faults, lab, "colocated_faults", teacher_port, *settings))


def test_one_process_of_an_engine_with_two_dies_and_hangs(lab: Lab, teacher_port: int) -> None:
    """Fails if an engine waits for ever for a dead or stopped worker of its tensor-parallel group, or parts of the old
    engine are left.
    """
    settings = ("rollout.n_gpus_per_node=2", "rollout.tp=2", "rollout.hang_timeout_s=10")
    victims = {2: "engine_child", 3: "stopped_engine_child"}
    faults: list[Fault] = [("rollout", generation_of(step), 0.0, victim) for step, victim in victims.items()]
    survived(faults, lab, "tp_faults", teacher_port, *settings)


def test_an_engine_that_dies_once_too_often_ends_the_run_with_a_checkpoint(lab: Lab, teacher_port: int) -> None:
    """Fails if a bad engine ends the run without its name, or loses a finished step."""
    run_dir = lab.root / "bad_card"
    faults: list[Fault] = [("rollout", generation_of(step), 0.0, "engine") for step in (2, 3)]
    done = run_with(faults, lab, run_dir, teacher_port, RECORD)
    assert done.returncode == 1, done.stderr[-4000:]
    (line,) = [text for text in done.stderr.splitlines() if text.startswith("EngineFailed")]
    assert "rollout engine 0 (" in line and "rollout.max_restarts = 1" in line
    assert (run_dir / "checkpoints" / "latest").read_text().strip() == "step_00000002"
    assert int(read_metrics(run_dir / "metrics.jsonl")[-1]["step"]) == 2


def test_an_interrupt_while_an_engine_is_started_again(lab: Lab, teacher_port: int) -> None:
    """Fails if Ctrl-C waits for the new engine although another is up, loses finished steps, or leaves a process."""
    run_dir = lab.root / "interrupted_restart"
    more = ("trainer.total_steps=60", MANY, "trainer.scheduler=one_step_off", "rollout.n_gpus_per_node=2")
    process = start(lab, run_dir, teacher_port, *more, env={"GKD_TEST_RUN": str(run_dir)})
    log = run_dir / "log.txt"
    try:
        wait_for_step(run_dir, 2, process)
        next(p for p in psutil.Process(process.pid).children(recursive=True) if is_engine(p)).kill()
        wait_until(lambda: "starting it again" in log.read_text(), 60.0, "the restart")
        time.sleep(3.0)  # its process exists, and vLLM starts
        interrupt(process, signal.SIGINT)
    finally:
        process.kill()
    reached = int(read_metrics(run_dir / "metrics.jsonl")[-1]["step"])
    assert (run_dir / "checkpoints" / "latest").read_text().strip() == f"step_{reached:08d}"
