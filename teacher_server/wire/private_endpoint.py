"""Create the socket of the local workers, in a folder that only processes of this user can open.

Every process that connects to it is accepted as a worker, so the folder has mode 0700. A killed server
cannot remove its folder, so each start removes the folders of dead servers.
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
    """Return a ZMQ endpoint in a new folder. `stack` removes the folder.

    Raises:
        ServerError: if the temporary folder cannot be written, or its path is too long for a socket.
    """
    try:
        base = Path(tempfile.gettempdir())
        _remove_leftovers(base)
        folder = tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}.", dir=base)  # mode 0700
    except OSError as error:
        raise ServerError(
            f"cannot create a temporary folder: {error}. Fix: set TMPDIR to a folder you can write."
        ) from error
    stack.callback(shutil.rmtree, folder, ignore_errors=True)
    path = os.path.join(folder, _SOCKET)
    if len(os.fsencode(path)) > _MAX_UNIX_PATH:
        raise ServerError(f"{path} is too long for a socket path. Fix: set TMPDIR to a shorter folder.")
    return f"ipc://{path}"


def _remove_leftovers(base: Path) -> None:
    for folder in base.glob(f"{_PREFIX}*"):
        pid = folder.name.removeprefix(_PREFIX).partition(".")[0]
        try:
            mine = folder.lstat().st_uid == os.getuid() and folder.is_dir() and not folder.is_symlink()
        except OSError:  # removed in the meantime
            continue
        # A pid may belong to another container with the same temporary folder, so the socket is checked too.
        if mine and pid.isdecimal() and not _runs(int(pid)) and not _accepts_connections(folder / _SOCKET):
            log.info("removing %s of a dead server", folder)
            shutil.rmtree(folder, ignore_errors=True)


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # it runs as another user
        return True
    return True


def _accepts_connections(path: Path) -> bool:
    """Return whether a process listens on this socket."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(0.2)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:  # a full backlog, for example: assume that a process listens
            return True
    return True
