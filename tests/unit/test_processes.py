"""Test that no started process outlives the quickstart, with real processes."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

from examples.quickstart import processes
from gkd.errors import ClusterError
from tests.processes import FOREVER


def family_script(body: str) -> list[str]:
    return [sys.executable, "-c", "from examples.quickstart import processes\n" + textwrap.dedent(body)]


# A child that leaves a grandchild behind in a session of its own, as Ray's daemons are, and writes its pid.
ORPHAN_MAKER = """
import subprocess
print(subprocess.Popen(["sleep", "300"], start_new_session=True, stdout=subprocess.DEVNULL).pid)
"""


def test_orphans_in_other_sessions_are_stopped(tmp_path: Path) -> None:
    """If it fails, Ray's daemons outlive a trainer that was killed."""
    script = family_script(f"""
        import subprocess, sys
        with processes.process_family():
            pid = subprocess.run([sys.executable, "-c", {ORPHAN_MAKER!r}], stdout=subprocess.PIPE, text=True).stdout
            import psutil
            assert psutil.pid_exists(int(pid))
            print(pid)
    """)
    done = subprocess.run(script, capture_output=True, text=True, timeout=60, check=True)
    assert not psutil.pid_exists(int(done.stdout))


def test_a_child_that_ignores_sigterm_is_killed_and_earlier_children_are_not() -> None:
    """If it fails, one stubborn process keeps the machine busy after Ctrl-C, or one that was not started here ends."""
    stubborn = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); {FOREVER}"
    with subprocess.Popen(["sleep", "300"]) as earlier:
        with processes.process_family(grace_s=0.5):
            process = subprocess.Popen([sys.executable, "-c", stubborn], stdout=subprocess.PIPE)
            assert process.stdout.readline() == b"up\n"
        assert not psutil.pid_exists(process.pid) and earlier.poll() is None
        earlier.kill()


def test_children_die_with_their_parent() -> None:
    """If it fails, `kill -9` of the quickstart leaves the teacher server running."""
    script = family_script("""
        import threading
        child = processes.start(["sleep", "300"])
        print(child.pid, flush=True)
        threading.Event().wait()
    """)
    parent = subprocess.Popen(script, stdout=subprocess.PIPE, text=True)
    child = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.wait()
    psutil.wait_procs([child], timeout=30)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def test_a_failed_child_is_an_error() -> None:
    """If it fails, the quickstart continues after a failed part."""
    with pytest.raises(ClusterError):
        processes.run([sys.executable, "-c", "raise SystemExit(3)"], "making tea")
