"""Test the runner of test files: no orphans, a row for every outcome, and a table that an interrupt keeps."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests import by_file
from tests.processes import FOREVER, Commands, wait_until

# A child in a session of its own, as Ray's daemons are.
ORPHAN = f"import subprocess, sys; c = [sys.executable, '-c', '{FOREVER}']"
ORPHAN += f"; print(subprocess.Popen(c, start_new_session=True).pid, flush=True); {FOREVER}"


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE  # a container's first process may not reap
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_command_leaves_no_process(tmp_path: Path, interrupted: bool) -> None:
    """Fails if a file that exceeds its limit, or Ctrl-C, leaves servers and Ray nodes on the machine."""
    commands, out = Commands(), tmp_path / "out"
    status: list[int | None] = []

    def run() -> None:
        with out.open("w") as output:
            status.append(commands.run([sys.executable, "-c", ORPHAN], output, 60.0 if interrupted else 3.0, tmp_path))

    thread = threading.Thread(target=run)
    thread.start()
    wait_until(lambda: out.exists() and out.read_text().endswith("\n"), 60.0, "the child")
    pid = int(out.read_text())
    if interrupted:
        commands.stop()
    thread.join(60.0)
    assert not thread.is_alive() and not is_running(pid)
    # Its exit code is 0 if psutil, which kills the tree, was the first to wait for it.
    assert (status == [None]) is not interrupted
    if interrupted:
        with pytest.raises(KeyboardInterrupt), out.open("w") as output:
            commands.run([sys.executable, "-c", ""], output, 60.0, tmp_path)


def test_a_row_has_what_happened(tmp_path: Path) -> None:
    """Fails if a test is counted wrongly, or a broken file looks like success."""
    file = tmp_path / "test_some.py"
    file.write_text("""
import pytest
@pytest.fixture
def broken(): raise OSError
@pytest.mark.slow
def test_a(): pass
def test_b(): assert False
def test_c(broken): pass
@pytest.mark.parametrize("n", (1, 2))
def test_d(n): pytest.skip("needs 6 cards")
""")

    def row(*options: str) -> dict[str, Any]:
        return by_file.run_file(Commands(), str(file), options, 100.0, tmp_path / "log")

    found = row()
    assert (found["passed"], found["failed"], found["skipped"]) == (1, 2, 2) and "problem" not in found
    assert found["reasons"] == {"needs 6 cards": 2}
    assert (row("-m", "slow")["passed"], row("-m", "slow")["failed"]) == (1, 0)
    file.write_text("import nothing_of_this_name")
    assert row()["failed"] or "problem" in row()
    file.write_text("import os, signal\n\ndef test_a(): os.kill(os.getpid(), signal.SIGKILL)")
    assert "problem" in row()


def test_the_table_keeps_other_files(tmp_path: Path) -> None:
    """Fails if a run of one file erases the others' rows, or a deleted file stays in the table."""
    table = tmp_path / "table.json"
    row = {"passed": 1, "failed": 0, "skipped": 0, "seconds": 2, "commit": "x"}
    here = Path(__file__).relative_to(by_file.ROOT).as_posix()
    by_file.write_table(table, [{"file": here, **row}, {"file": "tests/gone.py", **row}])
    by_file.write_table(table, [{"file": "tests/by_file.py", **row, "passed": 3}])
    files = {one["file"]: one["passed"] for one in json.loads(table.read_text())["files"]}
    assert files == {here: 1, "tests/by_file.py": 3}
