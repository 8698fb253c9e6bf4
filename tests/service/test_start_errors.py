"""Start errors of the server: one line and exit code 2, before any worker starts."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from teacher_server.wire.sockets import private_endpoint
from teacher_server.worker.model_folder import inspect_model_folder
from tests.service.commands import run
from tests.service.harness import TRIVIAL, server_command, trivial_model

pytestmark = pytest.mark.service


def start_error(model: Path, *options: str) -> str:
    """Start a server that must exit at once, and return its error line."""
    with tempfile.TemporaryDirectory() as folder:  # a shared one may contain folders of dead servers, which are logged
        done = subprocess.run(
            server_command(model, *options),
            env=os.environ | {"TMPDIR": folder},
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr and "loading" not in done.stderr, "no worker may start"
    lines = done.stderr.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: ")
    return lines[0]


def test_ports_in_use(tiny_model: Path) -> None:
    """Fails if a second server waits, shares a port, or loads a model before it detects the conflict."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        line = start_error(tiny_model, "--port", port)
        assert f"tcp://127.0.0.1:{port}" in line and "--port" in line
        for flag in ("--worker-port", "--metrics-port"):
            assert flag in start_error(tiny_model, "--port", "0", flag, port)


@pytest.mark.parametrize(
    "words,tokens",
    [
        # A typo in --host opens an unauthenticated service to the network.
        (("--host", "0.0.0.0", "--worker-port", "0"), ("--host 0.0.0.0", "--keys", "--insecure")),
        (("--model", "/no/such/model"), ("/no/such/model",)),
        (("--gpus", "a,a"), ("GPU a ",)),
        (("--gpus", "a,b,c", "--tensor-parallel-size", "2", "--engine", "vllm"), ("3 GPUs",)),
    ],
)
def test_wrong_options(tiny_model: Path, words: tuple[str, ...], tokens: tuple[str, ...]) -> None:
    """Fails if a wrong option is found after minutes of loading, by a traceback, or not at all."""
    line = start_error(tiny_model, *words)
    assert all(token in line for token in tokens)


def test_secret_keys_that_other_users_can_read(tiny_model: Path, tmp_path: Path) -> None:
    """Fails if a server with --keys starts without keys, or with a secret key that other users can read."""
    keys = str(tmp_path / "keys")
    assert "keygen" in start_error(tiny_model, "--keys", keys)
    run("keygen", keys, "--client", "c")
    (tmp_path / "keys/server.key_secret").chmod(0o644)
    assert f"chmod 600 {keys}/server.key_secret" in start_error(tiny_model, "--keys", keys)


def test_a_worker_that_cannot_load_ends_the_server(tmp_path: Path) -> None:
    """Fails if an engine that cannot be loaded is retried forever, or the server runs without a worker."""
    engine = f"{TRIVIAL[1]}_nothing"
    words = server_command(trivial_model(tmp_path / "model"), "--engine", engine, "--port", "0")
    done = subprocess.run(words, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 2 and engine in done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: ") and "w0.0" in last and "code 2" in last


@pytest.mark.parametrize(
    "words,token",
    [
        (("--broker", "here"), "--broker here"),
        (("--broker", "127.0.0.1:1", "--name", "w3.1"), "--name w3.1"),
        (("--broker", "127.0.0.1:1", "--gpus", "0,1"), "--gpus 0,1"),
        (("--broker", "127.0.0.1:1", "--max-tokens", "5000"), "--max-tokens 5000"),
        (("--broker", "127.0.0.1:1", "--keys", "/no/keys"), "/no/keys"),
    ],
)
def test_a_worker_with_wrong_settings_exits(tmp_path: Path, words: tuple[str, ...], token: str) -> None:
    """Fails if a worker with wrong settings waits forever instead of exiting with an error."""
    done = run("worker", "--model", str(trivial_model(tmp_path / "model")), *TRIVIAL, *words, code=2)
    assert done.stderr.splitlines()[-1].startswith("error: ") and token in done.stderr


@pytest.mark.parametrize("row", [0, 7, 19990, 19999])
def test_the_fingerprint_depends_on_the_rows_of_added_tokens(tiny_model: Path, tmp_path: Path, row: int) -> None:
    """Fails if two checkpoints are one teacher although they differ in the trained rows of a few added tokens."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    weights = np.random.default_rng(0).normal(size=(20000, 512)).astype(np.float16)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": len(weights)}))
    fingerprints = []
    for change in (0, 1):
        weights[row] += change
        save_file({"embed": weights}, folder / "model.safetensors")
        fingerprints.append(inspect_model_folder(str(folder)).fingerprint)
    assert fingerprints[0] != fingerprints[1]


@pytest.mark.parametrize("suffix", [".safetensors", ".gguf"])
def test_the_fingerprint_of_an_own_engine_depends_on_its_weights(tmp_path: Path, suffix: str) -> None:
    """Fails if two checkpoints of one config.json are one teacher: stored scores and a resumed run would mix them."""
    folders = [trivial_model(tmp_path / name) for name in ("without", "a", "b", "same")]
    weights = np.random.default_rng(0).bytes(10 << 20)
    changed = bytearray(weights)
    changed[5 << 20 : 6 << 20] = bytes(1 << 20)
    for folder, data in zip(folders[1:], (weights, changed, weights), strict=True):
        (folder / f"model{suffix}").write_bytes(data)
    without, a, b, same = (inspect_model_folder(str(each), needs_weights=False).fingerprint for each in folders)
    assert len({without, a, b}) == 3
    assert same == a
    cache = tmp_path / "models--org--name" / "snapshots"
    snapshots = [trivial_model(cache / commit) for commit in ("1" * 40, "2" * 40)]
    assert len({inspect_model_folder(str(each), needs_weights=False).fingerprint for each in snapshots}) == 2


def test_a_ready_file_that_cannot_be_written(tiny_model: Path, tmp_path: Path) -> None:
    """Fails if the server only detects after loading that it cannot write the ready file."""
    assert f"--ready-file {tmp_path}: " in start_error(tiny_model, "--ready-file", str(tmp_path))
    (tmp_path / "file").touch()
    file = tmp_path / "file" / "ready.json"
    assert f"--ready-file {file}: " in start_error(tiny_model, "--ready-file", str(file))


@pytest.fixture
def short_path() -> Iterator[Path]:
    """Make a folder with a path short enough for a socket. The temporary folder of pytest-xdist is too long."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def test_folders_of_dead_servers_are_removed(short_path: Path, temporary_is: Callable[[Path], None]) -> None:
    """Fails if folders of killed servers stay, or the folder of a running server is removed."""
    temporary_is(short_path)
    exited = subprocess.Popen([sys.executable, "-c", ""])
    exited.wait(timeout=30)
    dead, listening = short_path / f"teacher_server.{exited.pid}.a", short_path / f"teacher_server.{exited.pid}.b"
    alive, other = short_path / f"teacher_server.{os.getppid()}.c", short_path / "teacher_server.notes"
    for folder in (dead, listening, alive, other):
        folder.mkdir()
    (dead / "workers").touch()
    with socket.socket(socket.AF_UNIX) as elsewhere, contextlib.ExitStack() as stack:
        elsewhere.bind(str(listening / "workers"))  # a server in another container, where its pid is in use
        elsewhere.listen()
        own = Path(private_endpoint(stack).removeprefix("ipc://")).parent
        assert own.name.startswith(f"teacher_server.{os.getpid()}.") and own.stat().st_mode & 0o077 == 0
        assert {*short_path.iterdir()} == {listening, alive, other, own}
    assert not own.exists()
