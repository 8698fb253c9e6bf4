"""Kill a process at a chosen operation of what it writes; for tests of what is left then."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable


def in_child(work: Callable[[], object]) -> int:
    """Runs `work` in a forked process; its exit code (0 done, 1 raised), or minus the signal that ended it."""
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
    """This process ends by SIGKILL right before its n-th operation that changes a name, or opens a file to write."""
    left = n

    def hook(event: str, args: tuple[object, ...]) -> None:
        nonlocal left
        writes = event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR)
        if writes or event in {"os.mkdir", "os.rename", "os.remove", "os.rmdir"}:
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
