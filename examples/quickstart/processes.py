"""Run child processes that never outlive their parent.

The parent becomes the reaper of its descendants (Linux: PR_SET_CHILD_SUBREAPER). It adopts orphans, such as Ray's
daemons, so `stop_all` finds them. A child receives SIGTERM when the parent dies (PR_SET_PDEATHSIG), so even `kill -9`
of the parent leaves no process.
"""

from __future__ import annotations

import ctypes
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

from gkd.errors import ClusterError

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_GRACE_S = 15.0


@contextmanager
def process_family() -> Iterator[None]:
    """Adopt every orphan among the descendants of this process, and stop all descendants at the end."""
    if sys.platform == "linux":
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        # A second signal must not interrupt the cleanup.
        signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = {number: signal.signal(number, signal.SIG_IGN) for number in signals}
        stop_all(psutil.Process().children())
        for number, handler in before.items():
            signal.signal(number, handler)


def start(command: Sequence[str], *, log: Path | None = None) -> subprocess.Popen[bytes]:
    """Start a child in its own session, so that Ctrl-C reaches only the parent, which stops it.

    Args:
        log: file for its output; None = this terminal.
    """
    output = None if log is None else log.open("wb")
    try:
        return subprocess.Popen(
            command,
            stdout=output,
            stderr=output and subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )
    finally:
        if output is not None:
            output.close()


def run(command: Sequence[str], what: str) -> None:
    """Run a child until it ends.

    Raises:
        ClusterError: it failed; its own message is on the terminal.
    """
    code = start(command).wait()
    if code:
        raise ClusterError(f"{what} ended with exit code {code} (see its message above)")


def wait_for_file(path: Path, process: subprocess.Popen[bytes], what: str, timeout_s: float) -> None:
    """Wait until the child has written `path`.

    Raises:
        ClusterError: the child ended first, or the time limit was reached.
    """
    deadline = time.monotonic() + timeout_s
    while not path.exists():
        if process.poll() is not None:
            raise ClusterError(f"{what} ended with exit code {process.returncode} before it was ready")
        if time.monotonic() > deadline:
            raise ClusterError(f"{what} was not ready within {timeout_s:g} s")
        time.sleep(0.1)


def stop_all(processes: Sequence[psutil.Process], grace_s: float = _GRACE_S) -> None:
    """Send SIGTERM, wait at most `grace_s`, and send SIGKILL to the remaining processes.

    Killed are those of `processes` that did not end, and every descendant of this process, including adopted orphans.
    Processes that have already ended are ignored.
    """
    for process in processes:
        _signal(process, signal.SIGTERM)
    _, alive = psutil.wait_procs(processes, timeout=grace_s)
    left = {*psutil.Process().children(recursive=True), *alive}
    for process in left:
        _signal(process, signal.SIGKILL)
    psutil.wait_procs(list(left), timeout=5.0)


def _signal(process: psutil.Process, number: int) -> None:
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        return  # already ended


def _die_with_parent() -> None:
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")
