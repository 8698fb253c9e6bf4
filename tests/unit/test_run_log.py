"""Test log.txt: what a run logs on the driver, the lines of its ranks, and the error that ends it."""

from __future__ import annotations

import logging
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from ray._private.ray_logging import global_worker_stdstream_dispatcher

from gkd.cluster.cluster import log_worker_lines
from gkd.config.load import load_config
from gkd.errors import CheckpointError, ClusterError
from gkd.log import get_logger, log_to
from gkd.run.folder import RunFolder
from gkd.run.open import open_run_folder
from tests.unit.kills import in_child

log = get_logger("test_run_log")


def folder_at(root: Path) -> RunFolder:
    settings = ["data.train_files=[a]", "model.path=m", f"trainer.run_dir={root}", "trainer.resume=auto"]
    return open_run_folder(load_config(None, settings), {"name": "t", "fingerprint": "f"})


def test_a_run_s_log_begins_with_its_checks_and_ends_with_its_error(tmp_path: Path) -> None:
    """Fails if the log lacks what was logged before there was a run folder, or why the run ended."""
    log.warning("checked %d", 4711)
    with pytest.raises(ClusterError), folder_at(tmp_path / "run").logged("==== start 4710"):
        log.info("trained 4712")
        raise ClusterError("rank 3 died")
    with folder_at(tmp_path / "run").logged("==== second"):
        log.info("resumed 4713")
    log.info("ended 4714")
    lines = (tmp_path / "run" / "log.txt").read_text().splitlines()
    kept = ("checked 4711", "trained 4712", "ClusterError: rank 3 died", "==== second", "resumed 4713")
    places = [next(i for i, line in enumerate(lines) if text in line) for text in ("==== start 4710", *kept)]
    assert places == sorted(places) and places[0] == 0
    assert "[gkd.test_run_log]" in lines[places[2]] and not any("ended 4714" in line for line in lines)


def test_the_lines_of_ranks_are_in_the_log_only(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Fails if the log lacks what ranks and engines print, has the tables of Ray's autoscaler, 25 lines every 5 s, or a
    second cluster of the process doubles the lines.
    """
    log_worker_lines()
    log_worker_lines()
    batch = {
        "actor_name": "ActorWorker",
        "pid": 17,
        "ip": "10.0.0.1",
        "lines": ["CUDA error", "second"],
        "is_err": True,
    }
    with folder_at(tmp_path / "run").logged("==== start 4710"):
        global_worker_stdstream_dispatcher.emit(batch)
        global_worker_stdstream_dispatcher.emit(batch | {"pid": "autoscaler", "lines": ["Node status of pid=17"]})
    lines = [line for line in (tmp_path / "run" / "log.txt").read_text().splitlines() if "pid=17" in line]
    assert [line.rsplit("] ")[-1] for line in lines] == ["CUDA error", "second"]
    assert all("ActorWorker" in line and "10.0.0.1" in line for line in lines)
    assert "CUDA error" not in capfd.readouterr().err


def test_a_killed_run_keeps_its_log(tmp_path: Path) -> None:
    """Fails if the last lines before a crash are in a buffer and lost."""
    code = (
        "import os, pathlib; from gkd.log import get_logger, log_to\n"
        f"with log_to(pathlib.Path({str(tmp_path / 'log.txt')!r}), 'head'):\n"
        "    get_logger('x').info('the last line')\n"
        "    os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, stderr=subprocess.DEVNULL).returncode == -9
    assert (tmp_path / "log.txt").read_text().endswith("the last line\n")


def test_an_unwritable_log_is_refused(tmp_path: Path) -> None:
    """Fails if a run starts whose log cannot be written, or the error does not name the file."""
    folder = folder_at(tmp_path / "run")
    (folder.root / "log.txt").mkdir()
    with pytest.raises(CheckpointError), folder.logged("==== start 4710"):
        raise AssertionError("the block must not run")


def test_a_full_disk_ends_the_log_and_not_the_run(tmp_path: Path) -> None:
    """Fails if a line that cannot be written raises an error in the loop, or is reported again and again."""

    def on_a_full_disk() -> None:
        reports: list[logging.LogRecord] = []
        logging.getLogger("gkd.log").addFilter(lambda record: reports.append(record) is None)
        resource.setrlimit(resource.RLIMIT_FSIZE, (300, 300))
        with log_to(tmp_path / "log.txt", "head"):
            for number in range(20):
                log.info("line %d of a run whose disk is full", number)
        assert len(reports) == 1 and (tmp_path / "log.txt").stat().st_size == 300

    assert in_child(on_a_full_disk) == 0
