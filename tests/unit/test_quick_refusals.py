"""Refusals by checks that need no torch: settings, run folder, teacher's port. They come first in the list."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gkd.config.schema import Route
from gkd.config.schema_teacher import TeacherConfig
from gkd.errors import TeacherUnavailable
from gkd.main_gkd import main
from gkd.preflight.teacher import check_reachable
from gkd.run.folder import LOCK
from gkd.run.open import check_run_folder
from tests.refusals import refuses
from tests.unit.test_run_folder import config as run_config
from tests.unit.test_run_folder import open_folder


@contextmanager
def refusing_port() -> Iterator[int]:
    """Yield a port of this host that refuses connections: it is bound, and nothing listens."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


@pytest.fixture
def refused(
    tmp_path: Path, gkd_log: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> Callable[..., list[str]]:
    """Return what returns the log and then the errors of a refused start. Neither model nor prompts exist."""
    file = tmp_path / "x.yaml"
    file.write_text(
        f"data: {{train_files: [none.jsonl]}}\nmodel: {{path: none}}\ntrainer: {{run_dir: {tmp_path}/run}}\n"
    )

    def refused(*overrides: str) -> list[str]:
        gkd_log.clear()
        assert main(["--config", str(file), *overrides]) == 2
        # On a busy machine the checks also report their time.
        logged = [line for line in gkd_log.messages if not line.startswith("checks")]
        return logged + capsys.readouterr().err.splitlines()

    return refused


def test_wrong_settings_are_first(refused: Callable[..., list[str]]) -> None:
    """Fails if a typo is behind what the checks of files find, or the others are not in the list."""
    lines = [line for line in refused("distill.loss=rkl", "rollout.n=0") if line.startswith("config error: ")]
    assert [line.split()[2] for line in lines[:2]] == ["rollout.n", "distill.loss"] and "forward_kl" in lines[1]
    assert len(lines) > 2


def test_the_run_folder_and_the_teacher_are_tried_before_the_prompts_are_read(
    tmp_path: Path, refused: Callable[..., list[str]]
) -> None:
    """Fails if all prompts are tokenized before the log names a silent teacher, or a refused run leaves a folder."""
    with refusing_port() as port:
        first, second, *_, last = refused(f"teacher.server_port={port}")
        assert f"127.0.0.1:{port}" in first and "the other checks go on" in first and "checking the model" in second
        assert last.startswith("config error: teacher.server_port") and not (tmp_path / "run").exists()
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "notes.txt").write_text("")
        keys = [line.split()[2] for line in refused(f"teacher.server_port={port}")[2:]]
    assert keys == ["trainer.run_dir", "model.path", "data.train_files", "teacher.server_port"]


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
