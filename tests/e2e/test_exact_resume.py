"""Test that a resumed run is bit-exact, and what a signal leaves of it. All kills: `python -m tests.e2e.kill_matrix`.

Batches in flight at a checkpoint: tests/unit/test_prefetch.py, and test_schedulers.py, run manually.
"""

from __future__ import annotations

import shlex
import shutil
import signal
import tempfile
from pathlib import Path

import psutil
import pytest

from gkd.metrics.writer import read_metrics
from tests.e2e.conftest import Lab, left_behind
from tests.e2e.exactness import steps_of
from tests.e2e.killed_main import generation_of
from tests.e2e.test_loop import interrupt, start, wait_for_step

pytestmark = pytest.mark.e2e


def test_a_resumed_run_replaces_its_engine_and_ends_at_a_signal(base_run: Path, lab: Lab, teacher_port: int) -> None:
    """If it fails, a resumed run trains on other tokens or with other states, an engine that dies is not replaced or
    gets other weights, or a run that is stopped in training loses a finished step, also because the signals
    reach its other processes or come again, or it keeps GPUs, ports, Ray daemons or files of vLLM.
    """
    run_dir, temporary = lab.root / "resumed", tempfile.mkdtemp()
    begin = base_run / "checkpoints" / "step_00000002"
    settings = (f"trainer.resume={begin}", "trainer.total_steps=60", "weight_sync.verify=always")
    env = {"GKD_TEST_RUN": str(run_dir), "TMPDIR": temporary}
    killed = ("rollout", generation_of(1), 0.0, "engine")  # while it generates the batch of step 3
    process = start(lab, run_dir, teacher_port, *settings, env=env, faults=[killed])
    try:
        wait_for_step(run_dir, 5, process)
        for child in psutil.Process(process.pid).children(recursive=True):
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
                child.send_signal(number)
        wait_for_step(run_dir, 8, process)
        # Before the time limit, and at the limit to the process and to its group.
        stderr = interrupt(process, signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM)
    finally:
        process.kill()
    assert not left_behind(temporary)
    shutil.rmtree(temporary)
    assert shlex.split(stderr.splitlines()[-1])[-1] == "trainer.resume=auto", "the command to go on"
    before, after = steps_of(base_run), steps_of(run_dir)
    assert sum(line.get("perf/engine_restarts", 0) for line in after.values()) == 1
    # loss/engine_kl depends on which sequences shared a pass of the engine: after the kill they are others.
    exact = [key for key in before[4] if key.startswith(("loss/", "optim/", "rollout/")) and key != "loss/engine_kl"]
    for step in (3, 4):
        assert [after[step][key] for key in exact] == [before[step][key] for key in exact]
    reached = int(read_metrics(run_dir / "metrics.jsonl")[-1]["step"])
    assert (run_dir / "checkpoints" / "latest").read_text().strip() == f"step_{reached:08d}"
