"""Make what was written survive a power cut: flush files and folders to disk. Floor 0."""

from __future__ import annotations

import os
from pathlib import Path


def fsync(path: Path) -> None:
    """Flush one file, or the list of names of one folder (which a rename inside it changes). Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_tree(root: Path) -> None:
    """Flush a folder and everything below it. Raises OSError."""
    for path in [*root.rglob("*"), root]:
        fsync(path)


def write_synced(path: Path, data: bytes) -> None:
    """Write a whole file and flush it; its name lasts once its folder is flushed, too. Raises OSError."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
