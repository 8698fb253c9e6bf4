"""Whole runs of model families that Megatron lacks, with default settings; transformers trains on each batch again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.dist.megatron_reference import read_model
from tests.e2e.exactness import recorded
from tests.model_families import save_family
from tests.service.harness import ServerProcess
from tests.vision_reference import train

ADAMW: dict[str, Any] = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-4}
NAMES = Path(__file__).resolve().parents[1] / "torchvision_names"


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.cpu_only("bounds are those of a CPU's kernels")
@pytest.mark.parametrize(
    ("name", "dtype", "largest"),
    [("gpt_oss", "float32", 1e-6), ("deepseek_v3", "float32", 1e-6), ("qwen3_5", "bfloat16", 1e-2)],
)
def test_a_run_with_defaults_equals_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, dtype: str, largest: float
) -> None:
    """Fails if a part of the system does not know the family, the backend is not chosen, or packs train otherwise."""
    if find_spec("torchvision") is None:
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(NAMES)])))
    student, teacher = (save_family(tmp_path / each, name, seed=i) for i, each in enumerate(("student", "teacher")))
    rows = [{"prompt": f"{'What is it? ' * (i % 3)}{i}"} for i in range(24)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run_dir = tmp_path / "run"
    settings = [
        *(f"data.train_files=[{tmp_path}/train.jsonl]", "data.max_prompt_length=64", "data.max_response_length=20"),
        *(f"model.path={student}", f"model.dtype={dtype}", "trainer.device=cpu", "trainer.total_steps=3"),
        *("trainer.global_batch_size=4", f"trainer.run_dir={run_dir}", "trainer.record_batches=true"),
        *("actor.optim.lr=0.003", "actor.optim.eps=1e-4", "rollout.n=2", "rollout.max_num_seqs=8"),
        *("rollout.kv_cache_mib=64", "teacher.topk=16", "teacher.wire=fp32", "trainer.cpu_cores=1"),
        *("weight_sync.verify=always", "rollout.stop_token_ids=[1]"),
    ]
    (tmp_path / "base.yaml").write_text("{}\n")
    with ServerProcess(teacher, tmp_path, options=("--engine", "hf", "--dtype", dtype)) as server:
        command = [sys.executable, "-m", "gkd.main_gkd", "--config", str(tmp_path / "base.yaml"), *settings]
        command.append(f"teacher.server_port={server.port}")
        done = subprocess.run(command, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "actor.strategy=auto: fsdp2" in done.stderr
    steps = [recorded(run_dir, step) for step in range(1, 4)]
    model = read_model(student, dtype=torch.float32, attn_implementation="eager").eval()
    losses, _ = train(model, None, steps, frozen=True, weight_decay=0.01, clip=1.0, **ADAMW)
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    np.testing.assert_allclose([line["loss/total"] for line in lines if line["step"]], losses, rtol=largest)
    assert all(line["weight_sync/verified_tensors"] > 0 for line in lines if line["step"])
