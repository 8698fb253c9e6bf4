"""Test time-outs of real runs: at the start, and during training."""

from __future__ import annotations

import json

import psutil
import pytest

from tests.e2e.conftest import Lab
from tests.e2e.test_loop import environment, start, wait_for_step

pytestmark = pytest.mark.e2e


@pytest.mark.slow  # in CI: tests/dist/test_startup.py
def test_start_time_out_names_the_ranks_and_their_code(
    lab: Lab, teacher_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if a hanging start ends without the ranks and their line of code, or leaves processes."""
    run_dir = lab.root / "slow_start"
    monkeypatch.setenv("GKD_TEST_RUN", str(run_dir))
    # No machine imports vLLM within 2 s.
    done = lab.train_run(run_dir, teacher_port, "trainer.init_timeout_s=2", timeout_s=120)
    assert done.returncode == 1, done.stderr[-3000:]
    assert "RankTimeout: trainer.init_timeout_s = 2" in done.stderr
    report = done.stderr[done.stderr.index("RankTimeout") :]
    assert (
        "actor rank 0" in report
        and "rollout engine 0" in report
        and f"stacks of all ranks: {run_dir}/stacks.txt" in report
    )
    stacks = (run_dir / "stacks.txt").read_text()
    assert "== rollout engine 0 (" in stacks and 'File "' in stacks, stacks
    assert "Traceback" not in done.stderr, done.stderr[-3000:]
    left = [p for p in psutil.process_iter() if environment(p).get("GKD_TEST_RUN") == str(run_dir)]
    _, alive = psutil.wait_procs(left, timeout=15)  # Ray's daemons end by themselves, within seconds
    assert not alive, [p.cmdline()[:3] for p in alive]


@pytest.mark.slow  # the start, and then the time-out
def test_hang_in_training_is_reported_apart_from_the_waiting_rank(lab: Lab, teacher_port: int) -> None:
    """Fails if the report does not name the rank that hangs first."""
    run_dir = lab.root / "hangs"
    limits = ("trainer.stage_timeout_s=14", "teacher.outage_budget_s=6", "teacher.request_timeout_s=6")
    process = start(lab, run_dir, teacher_port, "trainer.n_gpus_per_node=2", "trainer.total_steps=500", *limits)
    try:
        wait_for_step(run_dir, 1, process)
        rows = json.loads((run_dir / "gpus.json").read_text())["rows"]
        stopped = psutil.Process(next(row["pid"] for row in rows if (row["pool"], row["rank"]) == ("actor", 1)))
        stopped.suspend()
        _, stderr = process.communicate(timeout=180)
    finally:
        process.kill()
    report = stderr[stderr.rindex("RankTimeout") :].splitlines()
    assert process.returncode == 1 and "actor rank 1" in report[0], stderr[-3000:]
    assert report[1].lstrip().startswith("actor rank 1 (") and "stopped by a signal" in report[1], report
    assert "(actor rank 0)" in report[2] and "in a collective, called at gkd/" in report[2], report
    _, alive = psutil.wait_procs([stopped], timeout=30)
    assert not alive
