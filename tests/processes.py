"""Wait for a condition; run a command with a time limit, and end every process that it started."""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TextIO

import psutil

FOREVER = "import threading; threading.Event().wait()"  # Python code that ends with its process
_MARKER = "GKD_TEST_COMMAND"  # environment variable by which all processes of a command are found


def wait_until(condition: Callable[[], object], timeout_s: float, what: str) -> None:
    """Poll `condition` until it is true. Fails the test after `timeout_s`."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"{what}: not within {timeout_s} s"
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    """Return whether a process runs. A zombie does not count."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


class Commands:
    """Commands that one `stop` ends, from any thread."""

    def __init__(self) -> None:
        self._stopped = threading.Event()
        self._running: set[str] = set()  # markers of the commands in progress
        self._lock = threading.Lock()

    def run(
        self, command: Sequence[str], output: TextIO, limit_s: float, cwd: Path, env: Mapping[str, str] | None = None
    ) -> int | None:
        """Run one command. No process of it is left afterwards, whatever session it is in.

        Args:
            output: where stdout and stderr go.
            env: additional variables.

        Returns:
            The exit status; None after `limit_s` seconds.

        Raises:
            KeyboardInterrupt: `stop` was called.
        """
        marker = secrets.token_hex(8)
        with self._lock:
            self._running.add(marker)
        try:
            if self._stopped.is_set():
                raise KeyboardInterrupt
            process = subprocess.Popen(
                command,
                cwd=cwd,
                env={**os.environ, **(env or {}), _MARKER: marker},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches this process alone, which ends them all
            )
            try:
                if self._stopped.is_set():  # in the meantime
                    raise KeyboardInterrupt
                return process.wait(limit_s)
            except subprocess.TimeoutExpired:
                return None
            finally:
                _kill(marker)
                process.wait()
        finally:
            with self._lock:
                self._running.discard(marker)

    def stop(self) -> None:
        """End all commands, and let none begin."""
        self._stopped.set()
        with self._lock:
            markers = list(self._running)
        for marker in markers:
            _kill(marker)


def _kill(marker: str) -> None:
    """End all processes that inherited this marker. Blocks until they are gone."""
    while found := [process for process in psutil.process_iter() if _has(process, marker)]:
        for process in found:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(found, timeout=1)  # a process that forked in the meantime has left a child


def _has(process: psutil.Process, marker: str) -> bool:
    try:
        return process.environ().get(_MARKER) == marker and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
