"""Read what the kernel of this host reports: processes, memory that is left; choose the temporary folder of a run."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

import psutil

from gkd.errors import ClusterError
from gkd.log import get_logger


class Process(NamedTuple):
    parent: int
    started: int  # clock ticks after boot


def process_info(pid: int) -> Process | None:
    """Return the parent and start time of a process; None if it does not exist or is a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, parent, *rest = text.rpartition(")")[2].split()  # the name may contain any character
    return None if state in "ZX" else Process(int(parent), int(rest[17]))


def nearest_ancestor(pid: int, roots: Collection[int]) -> int | None:
    """Return the process itself or its nearest ancestor in `roots`; None if there is none, or the process ended."""
    while pid > 1:
        if pid in roots:
            return pid
        process = process_info(pid)
        if process is None:
            return None
        pid = process.parent
    return None


_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))  # cgroup v2, v1


def host_memory_bytes() -> int:
    """Return the bytes that the processes of this host may use together, in a container at most its limit."""
    total = int(psutil.virtual_memory().total)
    return min([total, *filter(None, map(_limit, _LIMITS))])


def _limit(file: Path) -> int | None:
    """Read a memory limit from a cgroup file, in bytes; None means the file is missing or sets no limit."""
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


# The temporary folder of a run, and Ray's folder in it. Sockets are in it, and the kernel limits the path of a socket.

log = get_logger("temporary")

MOST_BYTES = 107  # longest path of a socket (sockaddr_un.sun_path)
_PREFIX = "ray_"
# The longest path below the temporary folder: mkdtemp's name, Ray's session with date and pid, a socket.
_RAY_BYTES = len(f"/{_PREFIX}12345678/session_2026-01-31_23-59-59_123456_4194304/sockets/plasma_store")
_SHORT = Path("/tmp")
_FIX = "Fix: set RAY_TMPDIR to a short folder that you can write."


def temporary_folder(n_bytes: int) -> Path:
    """Return RAY_TMPDIR, else TMPDIR; /tmp if that one is too long for the paths of sockets.

    Args:
        n_bytes: of the longest path below the folder.

    Raises:
        ClusterError: it is too long, and /tmp cannot be written.
    """
    variable, named = _named()
    size = len(os.fsencode(named))
    most = MOST_BYTES - n_bytes
    if size <= most:
        return named
    if os.access(_SHORT, os.W_OK | os.X_OK):
        return _SHORT
    problem = f"sockets need a folder of at most {most} bytes, this one has {size}, and {_SHORT} cannot be written."
    raise ClusterError(f"{variable} = {str(named)!r}: {problem} {_FIX}")


def make_ray_folder() -> Path:
    """Make a folder for the Ray of this run alone. Raises ClusterError: it cannot be made, or its path is too long."""
    base, (variable, named) = temporary_folder(_RAY_BYTES), _named()
    if base != named:
        text = "%s = %r has more than the %d bytes that Ray's sockets leave: Ray uses %s. Set RAY_TMPDIR to choose"
        log.warning(text, variable, str(named), MOST_BYTES - _RAY_BYTES, base)
    try:
        return Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
    except OSError as error:
        problem = f"Ray's folder cannot be made ({error})."
        raise ClusterError(f"{variable} = {str(base)!r}: {problem} {_FIX}") from error


def remove_ray_folder(folder: Path, *, keep_logs: bool) -> None:
    """Remove the folder. The processes that use it have ended.

    Args:
        keep_logs: leave Ray's logs, which errors of Ray name, and log where they are.
    """
    logs = [path for path in folder.glob("session_*/logs") if not path.parent.is_symlink()]
    if not keep_logs or not logs:
        shutil.rmtree(folder, ignore_errors=True)
        return
    for path in (path for log_folder in logs for path in log_folder.parent.iterdir() if path != log_folder):
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
    log.info("Ray's logs of this failed run: %s; remove %s when you have read them", logs[0], folder)


def _named() -> tuple[str, Path]:
    """Return the variable that chooses the folder, and the folder."""
    variable = "RAY_TMPDIR" if os.environ.get("RAY_TMPDIR") else "TMPDIR"
    return variable, Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()).absolute()
