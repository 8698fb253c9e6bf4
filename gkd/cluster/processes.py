"""Which processes of this machine live, and whose children they are; from /proc."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple


class Process(NamedTuple):
    parent: int
    started: int  # clock ticks after boot


def process_info(pid: int) -> Process | None:
    """None: there is no such process, or it has ended and only its parent has not noticed."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, parent, *rest = text.rpartition(")")[2].split()  # the name before it may hold anything
    return None if state in "ZX" else Process(int(parent), int(rest[17]))


def nearest_ancestor(pid: int, roots: Collection[int]) -> int | None:
    """The nearest of `roots` that this process is or descends from; None: of none, or it does not live here."""
    while pid > 1:
        if pid in roots:
            return pid
        process = process_info(pid)
        if process is None:
            return None
        pid = process.parent
    return None
