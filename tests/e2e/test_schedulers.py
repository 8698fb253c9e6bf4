"""Schedulers that answer batches ahead: as stale as they promise, and killed and resumed the same run, to the bit.

In full: `python -m tests.e2e.kill_matrix --layouts one_step_off,two_step_off`. The stream is in `test_stream.py`.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gkd.metrics import read_metrics
from tests.e2e.conftest import Lab
from tests.e2e.kill_matrix import Kill, Runs, torture

pytestmark = pytest.mark.e2e
N_STEPS = 5


def _run(lab: Lab, port: int, name: str, *settings: str) -> Path:
    run_dir = lab.root / name
    done = lab.train_run(run_dir, port, f"trainer.total_steps={N_STEPS}", *settings)
    assert done.returncode == 0, done.stderr[-4000:]
    return run_dir


@pytest.mark.parametrize("scheduler", ["one_step_off", pytest.param("two_step_off", marks=pytest.mark.slow)])
def test_a_killed_run_ahead_is_the_same_run(scheduler: str, lab: Lab, teacher_port: int) -> None:
    """If it fails, batches that were in flight at a checkpoint are lost, answered by other weights, or trained twice;
    or a run ahead is not as stale as its name says.
    """
    settings = (f"trainer.scheduler={scheduler}", "trainer.save_every=1", "trainer.keep_last=9")
    base = _run(lab, teacher_port, f"{scheduler}_base", *settings)
    ahead = {"one_step_off": 1, "two_step_off": 2}[scheduler]
    lines = read_metrics(base / "metrics.jsonl")
    assert [line["staleness/max"] for line in lines if "loss/total" in line] == [
        min(step, ahead) for step in range(N_STEPS)
    ]
    state = json.loads((base / "checkpoints" / "step_00000002" / "trainer.json").read_text())
    assert state == {"step": 2, "sampler_position": 6 * (2 + ahead), "unfinished": []}
    runs = Runs(
        lab,
        teacher_port,
        lab.root / f"{scheduler}_logs",
        (*settings, "trainer.resume=auto", f"trainer.total_steps={N_STEPS}"),
    )
    outcomes = torture(runs, base, lab.root / f"{scheduler}_killed", [Kill("train", 4, 0.0, "all")])
    assert outcomes[0].killed and outcomes[0].reached >= 2
