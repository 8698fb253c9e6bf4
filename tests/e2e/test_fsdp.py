"""Test the whole loop on the FSDP2 backend: Ray, vLLM, the ZMQ teacher server, two actor ranks that shard weights."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from gkd.metrics.writer import read_metrics
from gkd.quickstart.check_export import count_equal
from tests.e2e.conftest import Lab

pytestmark = [pytest.mark.e2e, pytest.mark.slow]  # CI covers adapters in test_losses.py


def test_adapters_are_trained_and_merged_weights_are_synced(lab: Lab, teacher_port: int) -> None:
    """If it fails, ranks do not export together, or engines and the export do not hold the merged weights.

    tests/dist/test_fsdp_student.py compares the trained adapters with peft's.
    """
    run_dir = lab.root / "fsdp_run"
    done = lab.train_run(
        run_dir,
        teacher_port,
        "actor.strategy=fsdp2",
        "actor.lora.rank=8",
        "trainer.n_gpus_per_node=2",
        "rollout.n_gpus_per_node=2",
        "rollout.tp=2",
        "weight_sync.verify=always",
    )
    assert done.returncode == 0, done.stderr[-4000:]
    lines = {int(line["step"]): line for line in read_metrics(run_dir / "metrics.jsonl")}
    assert sorted(lines) == [0, 1, 2, 3, 4]
    assert all(lines[step]["weight_sync/verified_tensors"] == 24 for step in range(1, 5))
    assert count_equal(run_dir / "export", run_dir / "samples" / "step_00000004.jsonl") == (50, 50)
    base, export = (load_file(folder / "model.safetensors") for folder in (lab.student, run_dir / "export"))
    moved = {name for name in base if not torch.equal(base[name], export[name])}
    assert moved == {name for name in base if name.endswith("_proj.weight")}
