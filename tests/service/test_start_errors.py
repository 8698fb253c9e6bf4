"""A server that cannot work says so in one line and with exit code 2, before any worker starts."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from teacher_server.errors import ServerError
from teacher_server.wire.private_endpoint import private_endpoint
from teacher_server.worker.model_folder import inspect_model_folder
from tests.service.harness import command, server_command, trivial_model

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
    line = run_to_its_error(tiny_model, "--host", "0.0.0.0", "--worker-port", "0")
    assert "--host 0.0.0.0" in line and "--keys" in line and "--insecure" in line


def test_missing_folder() -> None:
    """Would break if a mistyped path became a download or a traceback."""
    assert "model folder /no/such/model" in run_to_its_error(Path("/no/such/model"))


def test_taken_worker_and_metrics_ports(tiny_model: Path) -> None:
    """Would break if workers of other hosts, or Prometheus, found somebody else at the port they were told."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for flag in ("--worker-port", "--metrics-port"):
            assert flag in run_to_its_error(tiny_model, "--port", "0", flag, port)


def test_keys_that_others_can_read(tiny_model: Path, tmp_path: Path) -> None:
    """Would break if a server that was told to use keys started without them, or with keys that everybody has."""
    keys = str(tmp_path / "keys")
    assert "keygen" in run_to_its_error(tiny_model, "--keys", keys)
    subprocess.run(command("keygen", keys, "--client", "c"), check=True, capture_output=True, timeout=20)
    (tmp_path / "keys/server.key_secret").chmod(0o644)
    assert f"chmod 600 {keys}/server.key_secret" in run_to_its_error(tiny_model, "--keys", keys)


def test_a_gpu_that_is_not_there(tiny_model: Path) -> None:
    """Would break if a GPU named twice, or one too few for a group, showed only after minutes of loading."""
    assert "GPU a is named twice" in run_to_its_error(tiny_model, "--gpus", "a,a")
    assert "3 GPUs" in run_to_its_error(
        tiny_model, "--gpus", "a,b,c", "--tensor-parallel-size", "2", "--engine", "vllm"
    )


def test_a_worker_that_cannot_load_ends_the_server(tmp_path: Path) -> None:
    """Would break if a model that does not load were tried for ever, or the server sat there without a worker."""
    model = trivial_model(tmp_path / "model")
    (model / "config.json").write_text('{"max_position_embeddings": 100}')
    done = subprocess.run(
        server_command(model, "--engine", "trivial", "--port", "0"),
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 2 and "vocab_size" in done.stderr
    assert "worker w0.0 (teacher default) ended with code 2" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    "words,text",
    [
        (("--broker", "here"), "--broker here: not HOST:PORT"),
        (("--broker", "127.0.0.1:1", "--name", "w3.1"), "--name w3.1"),
        (("--broker", "127.0.0.1:1", "--gpus", "0,1"), "--gpus 0,1"),
        (("--broker", "127.0.0.1:1", "--max-tokens", "5000"), "--max-tokens 5000: the model takes 4096"),
        (("--broker", "127.0.0.1:1", "--keys", "/no/keys"), "/no/keys"),
    ],
)
def test_a_worker_with_wrong_settings_ends(tmp_path: Path, words: tuple[str, ...], text: str) -> None:
    """Would break if a worker on another host waited for ever for what it can never reach or do."""
    model = trivial_model(tmp_path / "model")
    done = subprocess.run(
        command("worker", "--model", str(model), "--engine", "trivial", *words),
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    assert done.returncode == 2 and done.stderr.splitlines()[-1].startswith("error: ") and text in done.stderr


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


@pytest.mark.parametrize("name", ["serve", "worker", "status", "drain", "keygen"])
def test_help_shows_examples(name: str) -> None:
    """Would break if the first thing a newcomer types failed or showed no command to copy."""
    done = subprocess.run(command(name, "--help"), capture_output=True, text=True, timeout=20, check=True)
    assert "example" in done.stdout and "  python -m teacher_server" in done.stdout


def test_help_of_all(tiny_model: Path) -> None:
    """Would break if the bare command did not say how to begin and which other commands there are."""
    done = subprocess.run(server_command(tiny_model, "--help"), capture_output=True, text=True, timeout=20, check=True)
    assert "python -m teacher_server --model models/tiny --port 15555" in done.stdout
    assert all(name in done.stdout for name in ("worker ", "status ", "drain ", "keygen "))


def test_a_ready_file_that_cannot_be_written(tiny_model: Path, tmp_path: Path) -> None:
    """Would break if a script waited for a file that the server finds out, after loading, it cannot write."""
    assert f"--ready-file {tmp_path}: this is a folder" in run_to_its_error(tiny_model, "--ready-file", str(tmp_path))
    (tmp_path / "file").touch()
    assert "Fix: name a file" in run_to_its_error(tiny_model, "--ready-file", str(tmp_path / "file" / "ready.json"))


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder whose path leaves room for a socket's; the one that pytest-xdist gives a test does not."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def test_folders_of_dead_servers_are_removed(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would break if killed servers filled the temporary folder, or a start took the socket of one that lives."""
    monkeypatch.setattr(tempfile, "tempdir", str(short_path))
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait(timeout=20)
    dead, heard = short_path / f"teacher_server.{ended.pid}.a", short_path / f"teacher_server.{ended.pid}.b"
    alive, other = short_path / f"teacher_server.{os.getppid()}.c", short_path / "teacher_server.notes"
    for folder in (dead, heard, alive, other):
        folder.mkdir()
    (dead / "workers").touch()
    with socket.socket(socket.AF_UNIX) as elsewhere, contextlib.ExitStack() as stack:
        elsewhere.bind(str(heard / "workers"))  # a server in another container: its pid means nothing here
        elsewhere.listen()
        own = Path(private_endpoint(stack).removeprefix("ipc://")).parent
        assert own.name.startswith(f"teacher_server.{os.getpid()}.") and own.stat().st_mode & 0o077 == 0
        assert {*short_path.iterdir()} == {heard, alive, other, own}
    assert not own.exists()
