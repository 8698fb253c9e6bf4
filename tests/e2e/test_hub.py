"""Test a whole run whose student, teacher and prompts are named as on the hub, on a node with a cache of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from gkd.config.load import load_config
from gkd.metrics.writer import read_metrics
from tests.dist.ray_nodes import NodeSpec, ray_nodes
from tests.e2e.conftest import Lab
from tests.hub import Hub


@pytest.mark.e2e
@pytest.mark.slow
def test_ranks_load_the_commits_that_the_driver_chose(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if a rank needs the driver's cache, loads another commit, or the run folder does not have the commits."""
    with Hub(tmp_path / "driver") as hub:
        student, teacher = hub.push("org/student", lab.student), hub.push("org/teacher", lab.teacher)
        rows = hub.push("datasets/org/words", {"train.jsonl": lab.train.read_bytes()})
        for name, value in hub.environment().items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "node"))
        with ray_nodes([NodeSpec(gpus=2, cpus=8)]) as address:
            monkeypatch.setenv("HF_HOME", str(hub.cache))
            models = ("model.path=org/student", "teacher.backend=local", "teacher.path=org/teacher")
            data = "data.train_files=['hf://datasets/org/words/train.jsonl']"
            settings = (f"cluster.ray_address={address}", "trainer.total_steps=1", *models, data)
            lab.finished_run(tmp_path / "run", 15555, *settings)
    assert len(read_metrics(tmp_path / "run/metrics.jsonl")) >= 1
    recorded = load_config(tmp_path / "run/config.yaml")
    assert (recorded.model.path, recorded.teacher.path) == (f"org/student@{student}", f"org/teacher@{teacher}")
    assert recorded.data.train_files == [f"hf://datasets/org/words@{rows}/train.jsonl"]
    for cache in (hub.cache, tmp_path / "node"):
        for name, commit in (("student", student), ("teacher", teacher)):
            assert (cache / f"hub/models--org--{name}/snapshots/{commit}/model.safetensors").is_file()
    assert (tmp_path / "run/export/model.safetensors").is_file()
