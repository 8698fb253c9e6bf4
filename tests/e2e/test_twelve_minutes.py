"""The rehearsal of `bash tests/gpu/twelve_minutes.sh`: tiny models, on the CPU and on a stand-in card."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.dry_card.environment import environment, gpu_python, remove_segments
from tests.gpu_proof.stages import TWELVE_MINUTES
from tests.processes import wait_until
from tests.structure import ROOT

LIMIT_S = 5400.0
pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(2 * LIMIT_S)]
TRL = Path(os.environ.get("GKD_TRL", "/nonexistent"))  # a folder with TRL, see tests/bench/bench_trl.py


def copy_of_tree(folder: Path) -> Path:
    """Copy what git tracks, without .git: that is what travels to a card."""
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    for name in filter(None, names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    return folder


def rows_in(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text())["stages"] if file.exists() else {}


def start(tree: Path, device: str, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    command = ["bash", "tests/gpu/twelve_minutes.sh", "--device", device, "--tiny", "--out", str(tree / "figures")]
    with (tree / "log.txt").open("wb") as log:
        return subprocess.Popen(command, cwd=tree, env=env, stdout=log, stderr=log)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_rehearsal_goes_on_in_another_folder(tmp_path: Path, device: str) -> None:
    """Fails if a stage fails with tiny models, a stop loses figures, or a second call measures again what has some."""
    card = environment(1, 8.0) if device == "cuda" else dict(os.environ)
    python = gpu_python() if device == "cuda" else ROOT / ".venv" / "bin" / "python"
    env = card | {"GKD_VENV": str(python.parents[1]), "GKD_COMMIT": "a" * 40, "GKD_TRL": str(TRL)}
    trees = [copy_of_tree(tmp_path / name) for name in ("first", "second")]
    file = trees[0] / "figures" / "twelve_minutes.json"
    calls: list[subprocess.Popen[bytes]] = []
    try:
        calls.append(stopped := start(trees[0], device, env))
        log = file.with_name("parity.log")  # of the fourth stage, once it runs
        wait_until(lambda: log.exists() and log.stat().st_size or stopped.poll() is not None, LIMIT_S, "parity")
        stopped.send_signal(signal.SIGINT)
        assert stopped.wait(120) == 130, (trees[0] / "log.txt").read_text()
        kept = rows_in(file)
        assert list(kept)[:3] == ["environment", "loss", "attention"]
        shutil.copy(file, trees[1] / "docs" / "results" / "twelve_minutes.json")
        calls.append(rest := start(trees[1], device, env))
        code = rest.wait(LIMIT_S)
    finally:
        for call in calls:
            call.terminate()  # it stops its own processes
            call.wait(120)
        if device == "cuda":
            remove_segments(env)
    rows = rows_in(trees[1] / "figures" / "twelve_minutes.json")
    assert all(rows[name] == kept[name] for name in ("environment", "loss", "attention"))
    lacking = {"trl", "real_pair_trl"} if not TRL.is_dir() else set()
    verdicts = {name: (row["verdict"], row["reason"]) for name, row in rows.items()}
    assert list(rows) == [stage.name for stage in TWELVE_MINUTES], verdicts
    assert {name for name, row in rows.items() if row["verdict"] != "pass"} == lacking, verdicts
    assert code == 0
