"""Look up live processes of this machine and their ancestors in /proc."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple


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
