"""Files and folders that last: what is flushed, and what a failed write leaves."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from gkd.run.disk import make_folder, replace_file
from tests.unit.kills import in_child


def names(flushed: list[tuple[Path, int]], root: Path) -> list[str]:
    return [os.path.relpath(path, root) for path, _ in flushed]


def test_every_new_folder_s_name_is_flushed(tmp_path: Path, flushed: list[tuple[Path, int]]) -> None:
    """Fails if a power cut can take a run's whole folder away, since its parents were new, too."""
    make_folder(tmp_path / "a" / "b" / "c")
    assert names(flushed, tmp_path) == [".", "a", "a/b"]
    make_folder(tmp_path / "a" / "b" / "c")
    assert len(flushed) == 3, "what is there costs nothing"


def test_a_file_is_replaced_whole(tmp_path: Path, flushed: list[tuple[Path, int]]) -> None:
    """Fails if the rename can reach the disk before the content, or a write that fails damages the old file."""
    file = tmp_path / "file"
    replace_file(file, b"old")
    assert names(flushed, tmp_path) == [".tmp_file", "."]

    def on_a_full_disk() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))
        with pytest.raises(OSError, match="File too large"):
            replace_file(file, b"x" * 100)

    assert in_child(on_a_full_disk) == 0
    assert file.read_bytes() == b"old"
    replace_file(file, b"new")
    assert file.read_bytes() == b"new" and [path.name for path in tmp_path.iterdir()] == ["file"]
