"""Test the wheel: built, installed into a fresh environment, and used from elsewhere, without the checkout.

The environment finds the libraries of the running one by a .pth file. Python processes the .pth files of the
environment alone, so the editable install of the checkout is not found.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest

from tests.e2e.conftest import Lab
from tests.e2e.test_one_line import SMALL
from tests.processes import wait_until
from tests.service.harness import trivial_model

pytestmark = pytest.mark.e2e
ROOT = Path(__file__).parents[2]
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an environment with the wheel, which is built from a copy: setuptools writes into its sources."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("gkd", "teacher_server"):
        shutil.copytree(ROOT / name, folder / "source" / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / "source")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    build = ["wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(folder / "source")]
    subprocess.run([*pip, *build], check=True, timeout=120)
    shutil.rmtree(folder / "source")
    (wheel,) = folder.glob("gkd-*.whl")
    made = folder / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(made)], check=True)
    python = ["--python", str(made / "bin/python")]
    subprocess.run([*pip, *python, "install", "--no-deps", "--no-compile", str(wheel)], check=True)
    (packages(made) / "libraries.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    return made


def packages(environment: Path) -> Path:
    """Return the folder with the installed packages of an environment."""
    (found,) = environment.glob("lib/python3.*/site-packages")
    return found


def run(environment: Path, folder: Path, *words: str, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
    """Run a command of the environment in a folder."""
    command = [str(environment / "bin" / words[0]), *words[1:]]
    return subprocess.run(
        command, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=timeout_s, check=False
    )


def test_the_wheel_has_every_file(fresh: Path) -> None:
    """Fails if a package or a data file, such as the report's page, is only in the checkout."""
    for top in ("gkd", "teacher_server"):
        files = [path for path in (ROOT / top).rglob("*") if path.is_file() and "__pycache__" not in path.parts]
        assert len(files) > 60
        assert not [path for path in files if not (packages(fresh) / path.relative_to(ROOT)).is_file()]


def test_the_installed_command_works_without_the_checkout(fresh: Path, tmp_path: Path) -> None:
    """Fails if a user of the wheel needs a file of the checkout to read settings or serve a teacher."""
    where = "import gkd, teacher_server; print(gkd.__file__, teacher_server.__file__)"
    found = run(fresh, tmp_path, "python", "-c", where).stdout.split()
    assert len(found) == 2 and all(Path(file).is_relative_to(fresh) for file in found)
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    for program in (["gkd"], ["gkd", "teacher"], ["python", "-m", "teacher_server"]):
        assert run(fresh, tmp_path, *program, "--version").stdout.startswith(f"gkd {version}, "), program
    assert "gkd teacher --model" in run(fresh, tmp_path, "gkd", "--help").stdout
    (tmp_path / "mine.yaml").write_text("model: {path: student}\ntrainer: {total_step: 3}\n")
    done = run(fresh, tmp_path, "gkd", "train", "--config", "mine.yaml")
    assert done.returncode == 2 and "did you mean trainer.total_steps" in done.stderr
    # An engine in the working folder, as with `python -m`.
    shutil.copy(ROOT / "tests/service/trivial_engine.py", tmp_path / "own_engine.py")
    trivial_model(tmp_path / "teacher")
    words = ["teacher", "--model", "teacher", "--engine", "own_engine:load", "--device", "cpu", "--port", "0"]
    command = [str(fresh / "bin/gkd"), *words, "--ready-file", "ready.json"]
    with subprocess.Popen(command, cwd=tmp_path, env=ENVIRONMENT, stdout=-1, stderr=-1) as server:
        try:
            started = tmp_path / "ready.json"
            wait_until(lambda: started.exists() or server.poll() is not None, 60.0, "server start")
            assert started.exists(), server.communicate()
            port = json.loads(started.read_text())["port"]
            assert f"127.0.0.1:{port}" in run(fresh, tmp_path, "gkd", "teacher", "status", "--port", str(port)).stdout
        finally:
            server.send_signal(signal.SIGTERM)
            server.communicate(timeout=30)
    assert server.returncode == 0


def test_a_user_of_the_wheel_trains(fresh: Path, lab: Lab, tmp_path: Path) -> None:
    """Fails if ranks, engines, teacher or export need a file that only the checkout has."""
    models = "--student", str(lab.student), "--teacher", str(lab.teacher), "--data", str(lab.train)
    done = run(fresh, tmp_path, "gkd", "train", *models, *SMALL, "trainer.device=cpu", timeout_s=280)
    assert done.returncode == 0, done.stderr[-4000:]
    run_dir = tmp_path / "runs" / f"{lab.student.name}-1"
    assert json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[-1])["step"] == 1
    assert (run_dir / "export/model.safetensors").is_file()
    assert json.loads((run_dir / "environment.jsonl").read_text())["git"] is None, "the run used the checkout"
    done = run(fresh, tmp_path, "gkd", "report", str(run_dir))
    assert done.returncode == 0 and (run_dir / "report.html").is_file(), done.stderr


@pytest.mark.slow
def test_the_quickstart_learns_with_the_wheel(fresh: Path, tmp_path: Path) -> None:
    """Fails if the release cannot repeat the figures of the quickstart. Examples and configs are not in the wheel."""
    for name in ("examples", "configs"):
        shutil.copytree(ROOT / name, tmp_path / name)
    done = run(fresh, tmp_path, "python", "-m", "examples.quickstart", timeout_s=880)
    assert done.returncode == 0, done.stderr[-4000:]
    summary = json.loads((tmp_path / "runs/quickstart/summary.json").read_text())
    assert summary["student_accuracy_after"] > 0.95 and summary["kl_drop"] > 0.95
    assert summary["export_equals_engine"] == "50/50"
