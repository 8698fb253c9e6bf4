"""Files and folders that last: what is flushed, and what a failed write leaves."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from pathlib import Path

import pytest

from gkd.files.disk import make_folder, replace_file
from tests.unit.kills import in_child


@pytest.fixture
def flushed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the flushed paths, relative to the test's folder, in order."""
    paths: list[str] = []

    def fsync(descriptor: int, flush: Callable[[int], None] = os.fsync) -> None:
        flush(descriptor)
        paths.append(os.path.relpath(os.readlink(f"/proc/self/fd/{descriptor}"), tmp_path))

    monkeypatch.setattr(os, "fsync", fsync)
    return paths


def test_every_new_folder_s_name_is_flushed(tmp_path: Path, flushed: list[str]) -> None:
    """Fails if a power cut can take a run's whole folder away, since its parents were new, too."""
    make_folder(tmp_path / "a" / "b" / "c")
    assert flushed == [".", "a", "a/b"]
    make_folder(tmp_path / "a" / "b" / "c")
    assert len(flushed) == 3, "what is there costs nothing"


def test_a_file_is_replaced_whole(tmp_path: Path, flushed: list[str]) -> None:
    """Fails if the rename can reach the disk before the content, or a write that fails damages the old file."""
    file = tmp_path / "file"
    replace_file(file, b"old")
    assert flushed == [".tmp_file", "."]

    def on_a_full_disk() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))
        with pytest.raises(OSError, match="File too large"):
            replace_file(file, b"x" * 100)

    assert in_child(on_a_full_disk) == 0
    assert file.read_bytes() == b"old"
    replace_file(file, b"new")
    assert file.read_bytes() == b"new" and [path.name for path in tmp_path.iterdir()] == ["file"]
