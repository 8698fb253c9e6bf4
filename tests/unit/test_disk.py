"""Files and folders that last: what is flushed, what a failed write leaves, and whether all nodes share a folder."""

from __future__ import annotations

import os
import resource
import shutil
from pathlib import Path

import pytest

from gkd.actor.shared_folder import answer, clear, collect, offer
from gkd.run.disk import make_folder, replace_file
from tests.refusals import refuses
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


def test_a_folder_that_is_not_shared_is_found_at_the_start(tmp_path: Path) -> None:
    """Fails if a run is first told at its first save that a node sees another folder, or may not write there."""
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    word = offer(here)
    answer(here, word, "actor rank 0", "a")
    with refuses("trainer.run_dir"):
        answer(there, word, "actor rank 1", "b")
    for file in here.iterdir():
        shutil.copy(file, there)  # a copy of the disk, not the disk
    answer(there, word, "actor rank 1", "b")
    with refuses("trainer.run_dir"):
        collect(here, word, {"actor rank 0": "a", "actor rank 1": "b"})
    collect(there, word, {"actor rank 0": "a", "actor rank 1": "b"})
    for file in there.iterdir():
        file.write_text("garbled")
    with refuses("trainer.run_dir"):
        answer(there, word, "actor rank 1", "b")
    (here / f".tmp_probe_{word}_actor_rank_2").mkdir()  # nor can a file be written there
    with refuses("trainer.run_dir"):
        answer(here, word, "actor rank 2", "c")
    with refuses("trainer.run_dir", str(here / "none")):
        offer(here / "none")
    for folder in (here, there):
        clear(folder)
        assert not list(folder.iterdir())
