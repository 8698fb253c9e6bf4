"""Test `python -m gkd.tools.check_gpus` on its own Ray cluster with logical GPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.service.harness import TRIVIAL, ServerProcess, trivial_model

pytestmark = pytest.mark.e2e


def check(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    config = folder / "check.yaml"
    config.write_text(
        "data: {train_files: [none.jsonl]}\nmodel: {path: none}\neval: {metric: none}\n"
        "trainer: {device: cpu, run_dir: none, n_gpus_per_node: 2, init_timeout_s: 60}\n"
        "actor: {tp: 2}\nrollout: {n_gpus_per_node: 2}\n"
    )
    command = [sys.executable, "-m", "gkd.tools.check_gpus", "--config", str(config), *words]
    clean = {key: value for key, value in os.environ.items() if key != "CUDA_VISIBLE_DEVICES"}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=clean)


@pytest.mark.slow  # test_colocate.py has one of each on one slot
def test_engines_on_the_actors_gpus(tmp_path: Path) -> None:
    """Fails if with trainer.colocate an engine is not on the GPUs of adjacent actor ranks."""
    options = (*TRIVIAL, "--gpus", "7")
    more = ("trainer.n_gpus_per_node=4", "rollout.n_gpus_per_node=4", "rollout.tp=2", "cluster.gpus=[6,4,2,1]")
    with ServerProcess(trivial_model(tmp_path / "model"), tmp_path, options=options) as server:
        done = check(tmp_path, "--json", "trainer.colocate=true", *more, f"teacher.server_port={server.port}")
    assert done.returncode == 0, done.stderr
    table = json.loads(done.stdout)
    assert table["verdicts"] == []
    seen = [row["cuda_visible_devices"] for row in table["rows"] if row["pool"] != "teacher"]
    assert seen == ["1", "2", "4", "6", "1,2", "4,6"]
