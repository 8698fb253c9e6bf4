"""Kill a process at a chosen file operation, for tests of what remains on disk."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable


def in_child(work: Callable[[], object]) -> int:
    """Run `work` in a forked process and return its exit code: 0 done, 1 raised, or minus the signal that ended it."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def kill_at(n: int) -> None:
    """Kill this process with SIGKILL right before its n-th operation that changes a name or opens a file to write."""
    left = n

    def hook(event: str, args: tuple[object, ...]) -> None:
        nonlocal left
        writes = event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR)
        if writes or event in {"os.mkdir", "os.rename", "os.remove", "os.rmdir"}:
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
