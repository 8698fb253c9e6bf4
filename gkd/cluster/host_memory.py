"""Return the memory of this host, or the limit of the container."""

from __future__ import annotations

from pathlib import Path

import psutil

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
