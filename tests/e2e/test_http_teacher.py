"""The whole loop with a teacher that `vllm serve` serves: the run of a teacher server, over HTTP."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gkd.metrics.writer import read_metrics
from tests.dist.helpers import free_port
from tests.e2e.conftest import Lab
from tests.service.http_servers import VllmServer

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.cpu_only("vllm serve runs on the CPU here")]
N_STEPS = 5


def losses(run_dir: Path) -> list[float]:
    lines = {int(line["step"]): line for line in read_metrics(run_dir / "metrics.jsonl")}
    return [lines[step]["loss/total"] for step in range(1, N_STEPS + 1)]


@pytest.mark.timeout(900)
def test_the_same_steps_with_zmq_and_with_http(lab: Lab, teacher_port: int, tmp_path: Path) -> None:
    """Fails if the kind of the server changes the training, or if teacher.json does not tell what scored the run."""
    same = (f"trainer.total_steps={N_STEPS}", "actor.optim.lr=0.001", "distill.losses=[{name: forward_kl}, {name: k1}]")
    key = ("teacher.api_key_env=GKD_TEST_TEACHER_KEY",)
    with (
        pytest.MonkeyPatch.context() as environment,
        VllmServer(lab.teacher, tmp_path / "vllm.log", free_port(), "--api-key", "secret-of-the-test") as server,
    ):
        environment.setenv("GKD_TEST_TEACHER_KEY", "secret-of-the-test")
        http = ("teacher.backend=http", f"teacher.url={server.url}", *key)
        for name, port, more in (("zmq", teacher_port, ()), ("http", 15555, http)):
            lab.finished_run(tmp_path / name, port, *same, *more)
    assert losses(tmp_path / "http") == pytest.approx(losses(tmp_path / "zmq"), rel=1e-4)
    recorded = json.loads((tmp_path / "http" / "teacher.json").read_text())
    assert recorded["name"] == str(lab.teacher) and len(recorded["probe"]) == 15
    written = b"".join(file.read_bytes() for file in (tmp_path / "http").rglob("*") if file.is_file())
    assert b"secret-of-the-test" not in written, "the key is in a file of the run"
