"""Write files so that they survive a kill and a power cut: flush files and folders, replace files atomically."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gkd.errors import CheckpointError
from gkd.log import get_logger

log = get_logger("disk")

TMP = ".tmp_"  # prefix of incomplete files and folders


def fsync(path: Path) -> None:
    """Flush a file, or the entries of a folder (which a rename changes). Raises OSError."""
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
    """Write a file and flush it; flush its folder, too, to make the name durable. Raises OSError."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def replace_file(path: Path, data: bytes) -> None:
    """Write a temporary file, flush it and rename it to `path`; a kill or a full disk leaves the old file intact.

    Raises OSError; the temporary file stays, and the next call overwrites it.
    """
    fresh = path.with_name(f"{TMP}{path.name}")
    write_synced(fresh, data)
    fresh.replace(path)
    fsync(path.parent)


def make_folder(path: Path) -> None:
    """Create a folder and its missing parents, and flush their names. Raises OSError."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in reversed(missing):
        fsync(folder.parent)


WRITE_FIX = "Fix: free space there, or correct the permissions; then resume with trainer.resume=auto."


@contextmanager
def naming(path: Path, what: str = "written") -> Iterator[None]:
    """Turn an OSError in the block into a CheckpointError that names the file and why it cannot be `what`."""
    try:
        yield
    except OSError as error:
        fix = f". {WRITE_FIX}" if what == "written" else ""
        raise CheckpointError(f"{path} cannot be {what}: {error}{fix}") from error


def remove(path: Path) -> None:
    """Delete a file or folder; log and keep it if that fails."""
    try:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        log.warning("%s cannot be removed: %s", path, error)
