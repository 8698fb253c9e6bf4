"""Train with one line, without a YAML and a second terminal: `gkd train --student A --teacher B --data FILE`."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.e2e.conftest import Lab

pytestmark = pytest.mark.e2e
SMALL = ("trainer.total_steps=1", "trainer.global_batch_size=4", "trainer.cpu_cores=1", "rollout.kv_cache_mib=32")
SMALL += ("data.max_prompt_length=16", "data.max_response_length=8", "rollout.max_num_seqs=16")


def train(lab: Lab, folder: Path, teacher: Path, *more: str) -> subprocess.CompletedProcess[str]:
    models = "--student", str(lab.student), "--teacher", str(teacher), "--data", str(lab.train)
    command = [sys.executable, "-m", "gkd.cli", "train", *models, *SMALL, *more]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=800, check=False)


def test_one_line_trains_with_a_teacher_of_its_own(lab: Lab, tmp_path: Path, shared_ray: str) -> None:
    """Fails if the line needs a file or another terminal, or leaves the server behind."""
    done = train(lab, tmp_path, lab.teacher, shared_ray, "trainer.device=cpu")
    assert done.returncode == 0, done.stderr[-4000:]
    run_dir = tmp_path / "runs" / f"{lab.student.name}-1"
    steps = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert steps[-1]["step"] == 1 and (run_dir / "export/config.json").is_file()
    assert "teacher: " in done.stderr, "its log is shown while it loads"
    pid = re.search(r"\[server (\d+)\]", run_dir.with_name(f"{run_dir.name}.teacher.log").read_text())
    assert pid is not None and not psutil.pid_exists(int(pid[1]))


def test_a_teacher_that_does_not_start_is_an_error(lab: Lab, tmp_path: Path) -> None:
    """Fails if the run waits for a server that has ended, or starts without it."""
    done = train(lab, tmp_path, lab.train)
    assert done.returncode == 1 and "before it was ready" in done.stderr and "teacher: " in done.stderr
    assert not (tmp_path / "runs" / f"{lab.student.name}-1").exists()
