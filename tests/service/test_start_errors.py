"""A server that cannot work says so in one line and with exit code 2, before any worker starts."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
from pathlib import Path

import pytest

from teacher_server.errors import ServerError
from teacher_server.model_folder import inspect_model_folder
from tests.service.harness import server_command

pytestmark = pytest.mark.service


def run_to_its_error(model: Path, *options: str) -> str:
    """The error line of a server that must end by itself, at once."""
    done = subprocess.run(server_command(model, *options), capture_output=True, text=True, timeout=20, check=False)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr and "loading" not in done.stderr, "a worker was started"
    lines = done.stderr.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: ")
    return lines[0]


def test_port_in_use(tiny_model: Path) -> None:
    """Would break if a second server waited, shared the port, or loaded a model before it noticed."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = run_to_its_error(tiny_model, "--port", str(port))
    assert f"tcp://127.0.0.1:{port}" in line and "--port" in line


def test_remote_host_needs_consent(tiny_model: Path) -> None:
    """Would break if a typo in --host opened an unauthenticated service to the network."""
    assert "--allow-remote" in run_to_its_error(tiny_model, "--host", "0.0.0.0")


def test_missing_folder() -> None:
    """Would break if a mistyped path became a download or a traceback."""
    assert "--model /no/such/model" in run_to_its_error(Path("/no/such/model"))


def _drop_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def _break_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def _drop_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def _cut_weights(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])


def _cut_header(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:40])


def _lose_a_shard(folder: Path) -> None:
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    "damage,words",
    [
        (_drop_config, "config.json is missing"),
        (_break_config, "not readable JSON"),
        (_drop_weights, "missing weights"),
        (_cut_weights, "damaged"),
        (_cut_header, "damaged"),
        (_lose_a_shard, "model-2.safetensors"),
    ],
)
def test_damaged_folders_are_told_without_torch(tiny_model: Path, tmp_path: Path, damage: object, words: str) -> None:
    """Would break if an interrupted download were noticed only after minutes of loading."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    assert callable(damage)
    damage(folder)
    with pytest.raises(ServerError, match=words):
        inspect_model_folder(str(folder))


def test_fingerprint_tells_weights_apart(tiny_model: Path, tmp_path: Path) -> None:
    """Would break if a fine-tuned copy of the same shape passed for the model the run started with."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    one = inspect_model_folder(str(folder)).fingerprint
    assert one == inspect_model_folder(str(tiny_model)).fingerprint
    weights = folder / "model.safetensors"
    raw = bytearray(weights.read_bytes())
    raw[-1] ^= 1
    weights.write_bytes(raw)
    assert inspect_model_folder(str(folder)).fingerprint != one


def test_help_shows_examples(tiny_model: Path) -> None:
    """Would break if the first thing a newcomer types failed or showed no command to copy."""
    done = subprocess.run(server_command(tiny_model, "--help"), capture_output=True, text=True, timeout=20, check=True)
    assert "python -m teacher_server --model models/tiny --port 15555" in done.stdout
