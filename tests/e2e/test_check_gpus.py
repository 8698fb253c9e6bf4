"""Test `python -m gkd.tools.check_gpus` on its own Ray cluster with logical GPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import ray

from gkd.cluster.cluster import Cluster
from tests.dist.ray_nodes import NodeSpec, ray_nodes
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


# CI reads the placement of whole runs (test_loop.py), and runs the command over several nodes (dist/test_pools.py).
@pytest.mark.slow
def test_valid_placement(tmp_path: Path) -> None:
    """Fails if a rank is missing, a valid placement has findings, or Ray assigns GPUs outside of cluster.gpus."""
    options = (*TRIVIAL, "--gpus", "7")
    with ServerProcess(trivial_model(tmp_path / "model"), tmp_path, options=options) as server:
        done = check(tmp_path, "--json", "rollout.tp=2", "cluster.gpus=[6,4,2,1]", f"teacher.server_port={server.port}")
        worker_pid = server.worker_pids[0]
    assert done.returncode == 0, done.stderr
    table = json.loads(done.stdout)
    assert table["verdicts"] == [] and table["device"] == "cpu"
    rows = {(row["pool"], row["rank"]): row for row in table["rows"]}
    assert list(rows) == [("actor", 0), ("actor", 1), ("rollout", 0), ("teacher", 0)]
    assert [row["cuda_visible_devices"] for row in rows.values()][:3] == ["1", "2", "4,6"]
    assert [row["ray_gpu_ids"] for row in rows.values()] == [["1"], ["2"], ["4", "6"], None]
    assert [row["local_rank"] for row in rows.values()] == [0, 1, 0, 0]
    assert rows["teacher", 0]["pid"] == worker_pid and rows["teacher", 0]["cards"][0]["id"] == "7"
    assert len({row["pid"] for row in rows.values()}) == 4


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


@pytest.mark.slow  # in CI: tests/unit/test_gpu_findings.py, and the command over several nodes (dist/test_pools.py)
def test_shared_gpus_and_a_silent_teacher(tmp_path: Path) -> None:
    """Fails if ranks with the GPUs ['0', '0', '1', '1'] pass, or if an unreachable teacher hides them."""
    silent = ("teacher.server_port=1", "teacher.outage_budget_s=0.5")
    with ray_nodes([NodeSpec(gpus=4, cpus=8, visible="0,0,1,1")]) as address:
        done = check(tmp_path, *silent, f"cluster.ray_address={address}")
    assert done.returncode == 1, done.stderr
    lines = done.stdout.splitlines()
    column = lines[0].split().index("CUDA_VISIBLE_DEVICES")
    assert [line.split()[column] for line in lines[1:5]] == ["0", "0", "1", "1"]
    wrong = [line.split()[1] for line in lines if line.startswith("WRONG")]
    assert wrong == ["shared_gpu:", "shared_gpu:", "teacher_silent:"], done.stdout
    assert "shared_gpu: actor 0, actor 1 " in done.stdout and "shared_gpu: rollout 0, rollout 1 " in done.stdout
    assert "['0', '0']" in done.stdout and "['1', '1']" in done.stdout


@pytest.mark.slow
def test_too_small_cluster(tmp_path: Path) -> None:
    """Fails if a pool that does not fit hides one that does, or if the checker waits as long as training."""
    cluster = Cluster("", n_slots=2, on_cpu=True)
    try:
        address = ray.get_runtime_context().gcs_address
        silent = ("teacher.server_port=1", "teacher.outage_budget_s=0.5")
        done = check(tmp_path, "--json", f"cluster.ray_address={address}", "rollout.n_gpus_per_node=4", *silent)
    finally:
        cluster.close()
    assert done.returncode == 1, done.stderr
    table = json.loads(done.stdout)
    assert [(row["pool"], row["cuda_visible_devices"]) for row in table["rows"]] == [("actor", "0"), ("actor", "1")]
    assert [verdict["kind"] for verdict in table["verdicts"]] == ["too_few_gpus", "teacher_silent"]
    problem = table["verdicts"][0]["problem"]
    assert "rollout" in problem and "4 GPUs" in problem and "0 of 1 node" in problem
    assert "GPU 2 (2 free)" in problem
    assert "n_gpus_per_node" in table["verdicts"][0]["fix"]
