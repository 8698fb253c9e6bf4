"""Kill a process at a chosen operation on the names of files and folders; for tests of what is left then."""

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
    """This process ends by SIGKILL right before its n-th operation on the names of files and folders."""
    left = n

    def hook(event: str, args: tuple[object, ...]) -> None:
        nonlocal left
        if event in {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir"}:
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
