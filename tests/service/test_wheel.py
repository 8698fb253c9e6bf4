"""Test the wheel: built, installed into a folder, and used from elsewhere, without the checkout."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import wait_until
from tests.service.harness import trivial_model

pytestmark = pytest.mark.service
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the installed wheel, which is built from a copy: setuptools writes into its sources."""
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
    target = folder / "installed"
    subprocess.run([*pip, "install", "--no-deps", "--no-compile", "--target", str(target), str(wheel)], check=True)
    return target


def test_the_wheel_has_every_file(installed: Path) -> None:
    """Fails if a package or a data file, such as the report's page, is only in the checkout."""
    for top in ("gkd", "teacher_server"):
        files = [path for path in (ROOT / top).rglob("*") if path.is_file() and "__pycache__" not in path.parts]
        assert len(files) > 60
        assert not [path for path in files if not (installed / path.relative_to(ROOT)).is_file()]


def test_the_installed_command_works_without_the_checkout(installed: Path, tmp_path: Path) -> None:
    """Fails if a user of the wheel needs a file of the checkout to read settings or serve a teacher."""
    env = os.environ | {"PYTHONPATH": str(installed)}  # before the editable install of the checkout

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [str(installed / "bin/gkd"), *words]
        return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=False)

    where = "import gkd, teacher_server; print(gkd.__file__, teacher_server.__file__)"
    found = subprocess.check_output([sys.executable, "-c", where], cwd=tmp_path, env=env, text=True).split()
    assert all(Path(file).is_relative_to(installed) for file in found)
    assert "gkd teacher --model" in run("--help").stdout
    (tmp_path / "mine.yaml").write_text("model: {path: student}\ntrainer: {total_step: 3}\n")
    done = run("train", "--config", "mine.yaml")
    assert done.returncode == 2 and "did you mean trainer.total_steps" in done.stderr
    # An engine in the working folder, as with `python -m`.
    shutil.copy(ROOT / "tests/service/trivial_engine.py", tmp_path / "own_engine.py")
    trivial_model(tmp_path / "teacher")
    words = ["teacher", "--model", "teacher", "--engine", "own_engine:load", "--device", "cpu", "--port", "0"]
    command = [str(installed / "bin/gkd"), *words, "--ready-file", "ready.json"]
    with subprocess.Popen(command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as server:
        try:
            started = tmp_path / "ready.json"
            wait_until(lambda: started.exists() or server.poll() is not None, 60.0, "server start")
            assert started.exists(), server.communicate()
            port = json.loads(started.read_text())["port"]
            assert f"127.0.0.1:{port}" in run("teacher", "status", "--port", str(port)).stdout
        finally:
            server.send_signal(signal.SIGTERM)
            server.communicate(timeout=30)
    assert server.returncode == 0
