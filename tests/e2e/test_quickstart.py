"""Test Ctrl-C in every part of the quickstart: it ends soon and leaves no process. Takes minutes: not run in CI."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.processes import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT)}  # examples/ is not installed


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a working directory with the configs; the quickstart writes its models and runs there."""
    made = tmp_path_factory.mktemp("quickstart")
    (made / "configs").symlink_to(ROOT / "configs")
    return made


def strangers(folder: Path) -> list[str]:
    """Return the command lines of processes in the folder, or of a Ray cluster that was started from it."""
    found = []
    for process in psutil.process_iter():
        try:
            if Path(process.cwd()) == folder:
                found.append(" ".join(process.cmdline())[:100])
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue  # it has ended, or has another user
    return found


# In this order: the first one is interrupted while the models are made, the others find them made.
@pytest.mark.parametrize(
    ("seen", "then_s"),
    [("[1/3]", 8.0), ("[2/3]", 2.0), ("the teacher server is ready", 9.0), ("step 5/", 0.0), ("[3/3]", 1.0)],
)
def test_interrupt_leaves_no_process(folder: Path, seen: str, then_s: float) -> None:
    """If it fails, Ctrl-C leaves a teacher server, Ray daemons or other processes running."""
    if seen == "[2/3]":
        command = [sys.executable, "-m", "examples.quickstart.make_models", "--out", "models/quickstart"]
        subprocess.run(command, cwd=folder, env=ENVIRONMENT, check=True, capture_output=True, timeout=400)
    log = folder / "log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "examples.quickstart", "trainer.total_steps=8"],
            cwd=folder,
            env=ENVIRONMENT,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        wait_until(lambda: seen in log.read_text() or process.poll() is not None, 120.0, seen)
        time.sleep(then_s)
        assert process.poll() is None, log.read_text()[-2000:]
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the whole foreground group
        # CPython ends itself by SIGINT, after all clean-up, where the interrupt came inside an exec() of some import;
        # a shell shows 130 in both cases.
        assert process.wait(timeout=40) in (130, -signal.SIGINT)
    finally:
        process.kill()
    assert log.read_text().splitlines()[-1].startswith("interrupted"), "the last line is not the quickstart's own"
    wait_until(lambda: strangers(folder) == [], 30.0, "the end of all processes")
