"""Test the runner of the slow tests: no orphans, a row for every outcome, and a table that an interrupt keeps."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path

import psutil
import pytest

from tests import slow
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
    """Fails if failed, skipped or unselected tests are counted wrongly, or a broken file looks like success."""
    file = tmp_path / "test_it.py"
    slow_one = "@pytest.mark.slow\ndef test_{}():\n    {}\n\n"
    bodies = {"a": "pass", "b": "assert False", "c": "pytest.skip('no')", "d": "pass"}
    file.write_text(
        "import pytest\n\n" + "".join(slow_one.format(*one) for one in bodies.items()) + "def test_e(): 1 / 0"
    )
    row = slow.run_file(Commands(), str(file), 100.0, tmp_path / "log")
    assert (row["passed"], row["failed"], row["skipped"]) == (2, 1, 1) and "problem" not in row
    file.write_text("import nothing_of_this_name")
    row = slow.run_file(Commands(), str(file), 100.0, tmp_path / "log")
    assert row["failed"] or "problem" in row


def test_the_table_keeps_other_files(tmp_path: Path) -> None:
    """Fails if a run of one file erases the others' rows, or a deleted file stays in the table."""
    table = tmp_path / "table.json"
    row = {"passed": 1, "failed": 0, "skipped": 0, "seconds": 2, "commit": "x"}
    here = Path(__file__).relative_to(slow.ROOT).as_posix()
    slow.write_table(table, [{"file": here, **row}, {"file": "tests/gone.py", **row}])
    slow.write_table(table, [{"file": "tests/slow.py", **row, "passed": 3}])
    files = {one["file"]: one["passed"] for one in json.loads(table.read_text())["files"]}
    assert files == {here: 1, "tests/slow.py": 3}
