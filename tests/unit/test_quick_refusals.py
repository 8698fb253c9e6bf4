"""Refusals before torch is imported and prompts are tokenized: settings, run folder, teacher's port."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gkd.config.schema import Route
from gkd.config.schema_teacher import TeacherConfig
from gkd.errors import TeacherUnavailable
from gkd.preflight.teacher import check_reachable
from gkd.run.folder import LOCK
from gkd.run.open import check_run_folder
from tests.refusals import refuses
from tests.unit.test_run_folder import config as run_config
from tests.unit.test_run_folder import open_folder

HEAVY = {"torch", "ray", "transformers", "tokenizers", "vllm", "megatron"}
_CODE = f"""
import sys
from gkd.main_gkd import main
code = main(sys.argv[1:])
print(code, sorted({HEAVY!r} & set(sys.modules)))
"""


@contextmanager
def refusing_port() -> Iterator[int]:
    """Yield a port of this host that refuses connections: it is bound, and nothing listens."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


def refused(tmp_path: Path, *overrides: str) -> str:
    """Return stderr of a start that must end before anything heavy is imported. Neither model nor prompts exist."""
    file = tmp_path / "x.yaml"
    file.write_text(
        f"data: {{train_files: [none.jsonl]}}\nmodel: {{path: none}}\ntrainer: {{run_dir: {tmp_path}/run}}\n"
    )
    command = [sys.executable, "-c", _CODE, "--config", str(file), *overrides]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    code, _, heavy = done.stdout.strip().partition(" ")
    assert heavy == "[]", done.stdout + done.stderr
    assert code in ("1", "2"), done.stderr
    # On a busy machine the checks also report their time.
    return "".join(line for line in done.stderr.splitlines(keepends=True) if "[gkd.run] checks: " not in line)


def test_a_wrong_setting_is_refused_before_heavy_imports(tmp_path: Path) -> None:
    """Fails if a typo costs the seconds that torch takes to import."""
    text = refused(tmp_path, "distill.loss=rkl", "rollout.n=0")
    lines = text.splitlines()
    assert len(lines) == 2 and all(line.startswith("config error: ") for line in lines)
    assert "distill.loss = 'rkl'" in text and "forward_kl" in text and "rollout.n = 0" in text


def test_a_used_run_folder_is_refused_before_heavy_imports(tmp_path: Path) -> None:
    """Fails if all prompts are tokenized before a run folder is refused."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("")
    with refusing_port() as port:
        assert "trainer.run_dir" in refused(tmp_path, f"teacher.server_port={port}")


def test_a_missing_teacher_is_refused_before_heavy_imports(tmp_path: Path) -> None:
    """Fails if all prompts are tokenized before the teacher's port is tried, or if the run leaves a folder behind."""
    with refusing_port() as port:
        text = refused(tmp_path, f"teacher.server_port={port}")
    assert text.startswith("TeacherUnavailable: ") and f"127.0.0.1:{port}" in text
    assert not (tmp_path / "run").exists()


def test_a_refused_connection_is_an_answer() -> None:
    """Fails if a closed port is waited for, or a port that listens is refused."""
    began = time.monotonic()
    with refusing_port() as port, pytest.raises(TeacherUnavailable, match=f"127.0.0.1:{port}"):
        check_reachable(Route("", TeacherConfig(server_port=port)), timeout_s=300)
    assert time.monotonic() - began < 60
    with socket.create_server(("127.0.0.1", 0)) as server:
        check_reachable(Route("", TeacherConfig(server_port=server.getsockname()[1])))


def test_a_connection_that_times_out_is_not_a_refusal() -> None:
    """Fails if a server whose accept queue is full is reported as missing."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server:
        address = server.getsockname()
        waiting = []
        try:
            for _ in range(8):  # more than the queue holds; the kernel drops the packets of the others
                connection = socket.socket()
                waiting.append(connection)
                connection.setblocking(False)
                connection.connect_ex(address)
            began = time.monotonic()
            check_reachable(Route("", TeacherConfig(server_port=address[1])), timeout_s=0.5)
            assert time.monotonic() - began > 0.4, "the queue was not full, so this test tests nothing"
        finally:
            for connection in waiting:
                connection.close()


@pytest.mark.parametrize("host", ["no.such.host.invalid", "x" * 70, "::1"])
def test_an_unknown_host_is_named(host: str) -> None:
    """Fails if a typo in the host name is reported as a server that is down."""
    with refuses("teacher.server_ip", host):
        check_reachable(Route("", TeacherConfig(server_ip=host)))


def test_the_early_check_of_a_run_folder(tmp_path: Path) -> None:
    """Fails if the check changes a folder, or lets pass what is refused later without need of the teacher."""
    new = run_config(tmp_path / "new")
    assert check_run_folder(new) is None and not (tmp_path / "new").exists()
    folder = open_folder(run_config(tmp_path / "run"))
    with refuses("trainer.run_dir"):
        check_run_folder(run_config(tmp_path / "run", "trainer.resume=auto"))
    folder.metrics_file.write_text("{}\n")
    del folder
    assert (tmp_path / "run" / LOCK).exists()
    for overrides, key in (
        ((), "trainer.run_dir"),
        (("trainer.resume=auto", "actor.optim.lr=0.5"), "actor.optim.lr"),
        ((f"trainer.resume={tmp_path}",), "trainer.resume"),
    ):
        with refuses(key):
            check_run_folder(run_config(tmp_path / "run", *overrides))
    assert check_run_folder(run_config(tmp_path / "run", "trainer.resume=auto")) is None
