"""Process control of a worker: handle signals at once, and exit with the parent process."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import threading
from collections.abc import Callable, Sequence

from teacher_server.errors import ServerError


class SignalWatch:
    """Call `on_signal(n)` at the n-th of these signals, from a separate thread.

    Python runs a handler between two bytecodes of the main thread, which may be in a forward pass for
    minutes. The C handler writes the wakeup descriptor at once, so a thread that reads it reacts at once.
    Create it in the main thread, once per process.
    """

    def __init__(self, numbers: Sequence[signal.Signals], on_signal: Callable[[int], None]) -> None:
        self._numbers, self._on_signal = numbers, on_signal
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for number in numbers:
            signal.signal(number, lambda *_: None)
        threading.Thread(target=self._run, name="signals", daemon=True).start()

    def _run(self) -> None:
        count = 0
        while True:
            for byte in self._reader.recv(16):
                if byte in self._numbers:
                    count += 1
                    self._on_signal(count)


def die_with_parent(parent_pid: int) -> None:
    """Let the kernel kill this process when the thread that started it ends (Linux)."""
    pr_set_pdeathsig = 1
    if ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL) != 0:
        raise ServerError(f"prctl(PR_SET_PDEATHSIG): {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent_pid:  # the parent died before the call
        raise ServerError(f"the server (pid {parent_pid}) has exited")
