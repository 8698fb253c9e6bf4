"""Test a teacher that is named as on the hub, with a local stand-in of the hub."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from teacher_server.worker.model_folder import inspect_model_folder
from tests.hub import Hub
from tests.service.commands import run
from tests.service.conftest import on_device
from tests.service.harness import ServerProcess, server_command

pytestmark = pytest.mark.service


@pytest.fixture
def hub(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with Hub(tmp_path / "cache") as hub:
        hub.push("org/tiny", tiny_model)
        for name, value in hub.environment().items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        yield hub


def test_a_teacher_is_named(hub: Hub, tiny_model: Path, tmp_path: Path) -> None:
    """Fails if a named teacher is another model than its folder, or if a server shows the cache instead of the name."""
    with ServerProcess(Path("org/tiny"), tmp_path, options=on_device()) as server:
        assert server.ready["fingerprint"] == inspect_model_folder(str(tiny_model)).fingerprint
        assert server.process.stdout is not None and b" model=org/tiny " in server.process.stdout.readline()
    assert any("/org/tiny/resolve/" in request for request in hub.requests)


def test_a_name_that_cannot_be_served(hub: Hub) -> None:
    """Fails if a mistyped name becomes a traceback or starts a worker."""
    done = run(*server_command(Path("org/none"), "--port", "0")[3:], code=2)
    assert done.stderr.splitlines()[-1].startswith(
        f"error: model folder org/none: no folder {Path('org/none').absolute()}, and "
    )


def test_ctrl_c_ends_a_download(hub: Hub) -> None:
    """Fails if a server that downloads its model cannot be stopped before it has all of it."""
    hub.stalled = ".safetensors"
    command = server_command(Path("org/tiny"), "--port", "0")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert hub.has_stalled.wait(30)
        process.send_signal(signal.SIGINT)
        hub.released.set()
        _, stderr = process.communicate(timeout=30)
    assert process.returncode == 130 and b"Traceback" not in stderr
