"""What a process of the server asks of the operating system: signals heard at once, death with its parent."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import threading
from collections.abc import Callable, Sequence

from teacher_server.errors import ServerError


class SignalWatch:
    """Calls `heard(n)` at the n-th of these signals, from a thread of its own.

    Python runs a handler between two bytecodes of the main thread, which may be in a forward pass for
    minutes. The wakeup descriptor is written by the C handler instead, so the thread hears of it at
    once. Make it in the main thread, one in a process.
    """

    def __init__(self, numbers: Sequence[signal.Signals], heard: Callable[[int], None]) -> None:
        self._numbers, self._heard = numbers, heard
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
                    self._heard(count)


def die_with_parent(parent_pid: int) -> None:
    """Let the kernel kill this process when the thread that started it ends (Linux)."""
    pr_set_pdeathsig = 1
    if ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL) != 0:
        raise ServerError(f"prctl(PR_SET_PDEATHSIG): {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent_pid:  # it died before the call
        raise ServerError(f"the server (pid {parent_pid}) is gone")
