"""Create sockets: options of all of them, and the private socket of the local workers.

Errors instead of silently dropped messages, limits and heartbeats are common to all. Every process that connects to the
socket of the local workers is accepted as a worker, so its folder has mode 0700. A killed server cannot remove its
folder, so each start removes the folders of dead servers.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import socket
import tempfile
from pathlib import Path
from typing import Any

import zmq

from teacher_server.errors import ServerError
from teacher_server.wire.protocol import MAX_FRAME_BYTES

HANDSHAKE_S = 5.0  # a peer that does not finish its handshake in this time is disconnected
# A black-holed TCP connection gives no error; ZMTP heartbeats detect it and reconnect.
_BEAT_MS = 500
_BEAT_TIMEOUT_MS = 2000
# Replies queued for a client that does not read. Further replies are dropped, and the client sends its requests again.
CLIENT_BACKLOG = 4096


def set_common_options(socket: zmq.Socket[Any]) -> None:
    """Set frame limit, heartbeats and handshake limit. Call it before bind or connect."""
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    socket.setsockopt(zmq.HEARTBEAT_IVL, _BEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _BEAT_TIMEOUT_MS)
    socket.setsockopt(zmq.HANDSHAKE_IVL, int(HANDSHAKE_S * 1000))
    socket.setsockopt(zmq.LINGER, 0)


def make_router(context: zmq.Context[zmq.Socket[bytes]], *, backlog: int) -> zmq.Socket[bytes]:
    """Create a ROUTER for peers that set their own identities.

    Args:
        backlog: messages queued for a peer that does not read; 0 = no limit (bounded otherwise).
    """
    socket = context.socket(zmq.ROUTER)
    set_common_options(socket)
    socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a client that reconnects keeps its identity
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # sending to a disconnected peer raises an error
    socket.setsockopt(zmq.SNDHWM, backlog)
    return socket


def bind(socket: zmq.Socket[bytes], endpoint: str, flag: str) -> int:
    """Bind, and return the TCP port (0 for other transports). Raises ServerError that names `flag`."""
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        fix = "stop the process that uses it, or choose another" if error.errno == zmq.EADDRINUSE else "change"
        if error.errno in (zmq.EADDRNOTAVAIL, errno.ENODEV):
            flag = "--host: not an address of this machine"
        raise ServerError(f"cannot listen on {endpoint}: {error.strerror}. Fix: {fix} {flag}.") from error
    port = socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2]
    return int(port) if endpoint.startswith("tcp:") else 0


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
