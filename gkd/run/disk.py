"""Make what was written survive a kill and a power cut: flush files and folders, replace files whole. Floor 0."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gkd.errors import CheckpointError
from gkd.log import get_logger

log = get_logger("disk")

TMP = ".tmp_"  # what begins so is half-made, and of no use once nobody writes it


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


def replace_file(path: Path, data: bytes) -> None:
    """Write beside `path`, flush and rename: a kill, a power cut or a full disk leaves the old file whole.

    Raises OSError; then the half-made `.tmp_` file stays, and the next call writes over it.
    """
    fresh = path.with_name(f"{TMP}{path.name}")
    write_synced(fresh, data)
    fresh.replace(path)
    fsync(path.parent)


def make_folder(path: Path) -> None:
    """Make a folder and its parents where they are missing, and flush their names. Raises OSError."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in reversed(missing):
        fsync(folder.parent)


@contextmanager
def naming(path: Path, what: str = "written") -> Iterator[None]:
    """An OSError inside is a CheckpointError that names the file and why it cannot be `what`."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path} cannot be {what}: {error}") from error


def remove(path: Path) -> None:
    """Delete a file or folder that nobody needs; what cannot be deleted is logged and left."""
    try:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        log.warning("%s cannot be removed: %s", path, error)
