"""Where the workers of this server find it: a socket in a folder that only this user's processes can open.

Whoever opens it is a worker, so the folder has mode 0700. A killed server cannot remove its own, so
each start removes those of dead ones.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import socket
import tempfile
from pathlib import Path

from teacher_server.errors import ServerError

log = logging.getLogger(__name__)

_PREFIX = "teacher_server."
_SOCKET = "workers"
_MAX_UNIX_PATH = 107  # sockaddr_un.sun_path


def private_endpoint(stack: contextlib.ExitStack) -> str:
    """A ZMQ endpoint in a new folder, which `stack` removes.

    Raises:
        ServerError: the temporary folder cannot be written, or its path is too long for a socket.
    """
    try:
        base = Path(tempfile.gettempdir())
        _remove_left_over(base)
        folder = tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}.", dir=base)  # mode 0700
    except OSError as error:
        raise ServerError(f"no folder for temporary files: {error}. Fix: set TMPDIR to one you can write.") from error
    stack.callback(shutil.rmtree, folder, ignore_errors=True)
    path = os.path.join(folder, _SOCKET)
    if len(os.fsencode(path)) > _MAX_UNIX_PATH:
        raise ServerError(f"{path} is too long for a socket path. Fix: set TMPDIR to a shorter folder.")
    return f"ipc://{path}"


def _remove_left_over(base: Path) -> None:
    for folder in base.glob(f"{_PREFIX}*"):
        pid = folder.name.removeprefix(_PREFIX).partition(".")[0]
        try:
            mine = folder.lstat().st_uid == os.getuid() and folder.is_dir() and not folder.is_symlink()
        except OSError:  # it has just gone
            continue
        # A pid alone tells nothing of another container with the same temporary folder.
        if mine and pid.isdecimal() and not _runs(int(pid)) and not _is_heard(folder / _SOCKET):
            log.info("removing %s of a server that died", folder)
            shutil.rmtree(folder, ignore_errors=True)


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # somebody else's
        return True
    return True


def _is_heard(path: Path) -> bool:
    """Whether somebody listens at this socket."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(0.2)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:  # a full backlog or the like: leave it alone
            return True
    return True
