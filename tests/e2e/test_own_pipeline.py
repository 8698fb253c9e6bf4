"""Run the example of a pipeline of one's own (`gkd.api`): Ray, vLLM, FSDP2 with cp 2, reference, teacher server."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.e2e.conftest import Lab
from tests.structure import ROOT

pytestmark = pytest.mark.e2e

EXAMPLE = ROOT / "examples" / "own_pipeline.py"


def test_the_example_trains_and_moves_states(lab: Lab, teacher_port: int, shared_ray: str) -> None:
    """Fails if the documented calls do not train, states stay on a device that the block has left, engines without
    colocation do not sleep, the actor's logprobs or weights are not those of the step, or the teacher does not get the
    engines' ids, without which it refuses to score.
    """
    run_dir = lab.root / "own_pipeline"
    ranks = ("trainer.n_gpus_per_node=2", "actor.strategy=fsdp2", "actor.cp=2")
    more = (*ranks, "distill.support=union", "trainer.total_steps=2")
    settings = lab.command(run_dir, teacher_port, shared_ray, *more)[5:]
    command = [sys.executable, str(EXAMPLE), str(EXAMPLE.with_suffix(".yaml")), *settings]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [line["step"] for line in lines] == [1, 2]
    for line in lines:
        assert line["memory/engines"] == line["memory/step/after_offload"] == 0 < line["memory/step/after_onload"]
        assert line["loss"] == pytest.approx(line["loss/forward_kl"] + 0.01 * line["loss/reference_kl"], rel=1e-5)
        assert line["logprob"] < 0 < line["time/step/execute"]
        # The weights of the engines, of the logprobs and of the training step are the same.
        assert line["loss/importance_weight"] == pytest.approx(1.0, abs=1e-4)
    assert lines[-1]["loss"] < lines[0]["loss"]
    kl = [line["loss/reference_kl"] for line in lines]
    assert abs(kl[0]) <= 1e-6 < kl[1], kl
    assert (run_dir / "export" / "config.json").exists()
