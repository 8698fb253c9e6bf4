"""The whole loop with the teacher on the actor's ranks: Ray, vLLM, Megatron-core or fully_shard, no teacher server."""

from __future__ import annotations

from pathlib import Path

import pytest

from gkd.metrics import read_metrics
from tests.e2e.conftest import Lab

pytestmark = pytest.mark.e2e

TOLERANCE = 1e-5
UNUSED_PORT = 15555  # the default; a local teacher has none


def losses(run_dir: Path) -> dict[int, float]:
    return {int(line["step"]): line["loss/total"] for line in read_metrics(run_dir / "metrics.jsonl") if line["step"]}


def train(lab: Lab, name: str, *overrides: str) -> Path:
    run_dir = lab.root / name
    local = ("teacher.backend=local", f"teacher.path={lab.teacher}", *overrides)
    done = lab.train_run(run_dir, UNUSED_PORT, *local)
    assert done.returncode == 0, done.stderr[-4000:]
    return run_dir


def test_losses_are_those_of_the_server(lab: Lab, base_run: Path) -> None:
    """If it fails, the two teachers say different things of the same answers, or a score reaches another sequence."""
    run_dir = train(lab, "local_run", "actor.strategy=megatron")
    found, expected = losses(run_dir), losses(base_run)
    assert found.keys() == expected.keys() == {1, 2, 3, 4}
    for step, loss in expected.items():
        assert abs(found[step] - loss) <= TOLERANCE, (step, found, expected)
    lines, served = (read_metrics(folder / "metrics.jsonl") for folder in (run_dir, base_run))
    names = [{name for line in each for name in line if name.startswith("teacher/")} for each in (lines, served)]
    assert names[0] == names[1] >= {"teacher/topk_mass", "teacher/score_bytes"}
