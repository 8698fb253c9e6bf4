"""The export's place in a run's folder: a whole one or none under the final name, whatever is killed when. Floor 1.

export/           the newest whole one
.new_export/      the next one while it is written; `publish` puts it in the place of the one before
.trash_export/    the one before, while it is deleted
"""

from __future__ import annotations

from pathlib import Path

from gkd.run.disk import fsync, naming, remove

_NAME, _NEW, _OLD = "export", ".new_export", ".trash_export"


def new_export(root: Path) -> Path:
    """Where the next one is written; nothing is there yet."""
    return root / _NEW


def publish(root: Path) -> Path:
    """Put the whole folder at `new_export` in the place of the export of an earlier end of the run; returns that place.

    There is no exchange in one operation on every file system. A kill between the two renames leaves the earlier one
    beside its place, and `tidy` puts it back.

    Raises:
        CheckpointError: it cannot be renamed; the earlier one stays.
    """
    final, old = root / _NAME, root / _OLD
    with naming(final):
        if final.exists():
            final.rename(old)
        try:
            new_export(root).rename(final)
        except OSError:
            if old.exists():
                old.rename(final)
            raise
        fsync(root)
    remove(old)
    return final


def tidy(root: Path) -> None:
    """Undo an exchange that was killed halfway, and delete what is left of a killed export. Raises OSError."""
    final, old = root / _NAME, root / _OLD
    if old.exists() and not final.exists():
        old.rename(final)
        fsync(root)
    for leftover in (old, *root.glob(f"{_NEW}*")):
        remove(leftover)


def delete(root: Path) -> None:
    """The export, and whatever is left of others; what cannot be deleted is logged and left."""
    for folder in (root / _NAME, root / _OLD, *root.glob(f"{_NEW}*")):
        remove(folder)
