"""A real run whose processes need longer to start than they may."""

from __future__ import annotations

import json

import psutil
import pytest

from tests.e2e.conftest import Lab
from tests.e2e.test_loop import environment, start, wait_for_step

pytestmark = pytest.mark.e2e


def test_a_start_that_takes_too_long_says_who_and_where(
    lab: Lab, teacher_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it fails, a start that hangs ends without a word of who hangs and at which line, or leaves processes."""
    run_dir = lab.root / "slow_start"
    monkeypatch.setenv("GKD_TEST_RUN", str(run_dir))
    # No machine imports vLLM in that time; and 2 s are over for a late rank of any other kind in the same way.
    done = lab.train_run(run_dir, teacher_port, "trainer.init_timeout_s=2", timeout_s=120)
    assert done.returncode == 1, done.stderr[-3000:]
    assert "RankTimeout: trainer.init_timeout_s = 2" in done.stderr
    told = done.stderr[done.stderr.index("RankTimeout") :]
    assert (
        "actor rank 0" in told and "rollout engine 0" in told and f"stacks of all ranks: {run_dir}/stacks.txt" in told
    )
    stacks = (run_dir / "stacks.txt").read_text()
    assert "== rollout engine 0 (" in stacks and 'File "' in stacks, stacks
    assert "Traceback" not in done.stderr, done.stderr[-3000:]
    left = [p for p in psutil.process_iter() if environment(p).get("GKD_TEST_RUN") == str(run_dir)]
    _, alive = psutil.wait_procs(left, timeout=15)  # Ray's daemons end by themselves, within seconds
    assert not alive, [p.cmdline()[:3] for p in alive]


@pytest.mark.slow  # the start, and then the time-out
def test_a_rank_that_hangs_in_training_is_told_from_the_one_that_waits_for_it(lab: Lab, teacher_port: int) -> None:
    """If it fails, of two ranks that do not answer nobody says which one hangs."""
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
    told = stderr[stderr.rindex("RankTimeout") :].splitlines()
    assert process.returncode == 1 and "actor rank 1" in told[0], stderr[-3000:]
    assert told[1].lstrip().startswith("actor rank 1 (") and "stopped by a signal" in told[1], told
    assert "(actor rank 0)" in told[2] and "in a collective, called at gkd/" in told[2], told
    _, alive = psutil.wait_procs([stopped], timeout=30)
    assert not alive
