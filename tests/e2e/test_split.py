"""Test `python -m gkd.tools.split --calibrate` with real components."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from gkd.metrics.writer import read_metrics
from tests.e2e.conftest import Lab


@pytest.mark.e2e
@pytest.mark.slow
def test_a_calibration_is_two_runs_and_a_ranking(lab: Lab, teacher_port: int) -> None:
    """Fails if the rates of real engines, a real teacher and a real student cannot be read from their run folders."""
    run = lab.command(lab.root / "unused", teacher_port)
    config, overrides = run[run.index("--config") + 1], [word for word in run if "=" in word]
    folder = lab.root / "calibration"
    command = [sys.executable, "-m", "gkd.tools.split", "--gpus", "6", "--json", f"--calibration-dir={folder}"]
    command += ["--calibrate", config, *overrides]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    told = json.loads(done.stdout)
    print(json.dumps(told["run"]), told["own"]["time"])
    assert told["run"]["sizes"] == {"dp": 1, "engines": 1, "workers": 1}
    rates = told["run"]["rates"]
    assert rates["pass_s"] + rates["sequence_s"] > 0 and rates["train_token_s"] > 0 and rates["score_token_s"] > 0
    # Each candidate divides six slots among actor, rollout and teacher.
    assert {sum(_gpus(c["split"])) for c in told["ranking"]} == {6} and len(told["ranking"]) == 4 * told["n_splits"]
    for concurrency in (16, 4):
        steps = _steps(folder / f"max_num_seqs_{concurrency}")
        assert max(step["perf/pass_bb"] / step["perf/pass_b"] for step in steps) <= concurrency
    assert not list(folder.glob("*/checkpoints")) + list(folder.glob("*/*export"))
    # The measured step that is printed next to the estimate is from the first run alone.
    assert told["run"]["scheduler"] == "sync" and told["run"]["steps"] == 8


def _gpus(split: dict[str, object]) -> tuple[int, int, int]:
    actor, rollout = split["actor"], split["rollout"]
    assert isinstance(actor, dict) and isinstance(rollout, dict) and isinstance(split["teacher_gpus"], int)
    return actor["nnodes"] * actor["per_node"], rollout["nnodes"] * rollout["per_node"], split["teacher_gpus"]


def _steps(folder: Path) -> list[dict[str, float]]:
    return read_metrics(folder / "tuner.jsonl")
