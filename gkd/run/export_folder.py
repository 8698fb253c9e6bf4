"""Replace the export of a run atomically: `export/` is complete or absent, whenever the process is killed.

export/           the newest complete export
.new_export/      the next one while it is written; `publish` renames it
.trash_export/    the previous one while it is deleted
"""

from __future__ import annotations

from pathlib import Path

from gkd.files.disk import fsync, naming, remove

NAME, _NEW, _OLD = "export", ".new_export", ".trash_export"


def new_export(root: Path) -> Path:
    """Return the folder to write the next export to; it does not exist yet."""
    return root / _NEW


def publish(root: Path) -> Path:
    """Replace an earlier export with the complete folder at `new_export`, and return its final path.

    Not every file system can exchange two folders in one operation. After a kill between the two renames `tidy`
    restores the earlier export.

    Raises:
        CheckpointError: it cannot be renamed; the earlier export stays.
    """
    final, old = root / NAME, root / _OLD
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
    """Undo a replacement that was killed halfway, and delete leftovers of a killed export. Raises OSError."""
    final, old = root / NAME, root / _OLD
    if old.exists() and not final.exists():
        old.rename(final)
        fsync(root)
    for leftover in (old, *root.glob(f"{_NEW}*")):
        remove(leftover)


def delete(root: Path) -> None:
    """Delete the export and all leftovers; log and keep what cannot be deleted."""
    for folder in (root / NAME, root / _OLD, *root.glob(f"{_NEW}*")):
        remove(folder)
