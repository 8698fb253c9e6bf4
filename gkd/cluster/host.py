"""Read what the kernel of this host reports: its processes, and the memory that is left."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

import psutil


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
