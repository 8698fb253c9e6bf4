"""Test time-outs of real runs: at the start, and during training."""

from __future__ import annotations

import json

import psutil
import pytest

from tests.e2e.conftest import Lab
from tests.e2e.test_loop import start, wait_for_step

pytestmark = pytest.mark.e2e


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
