"""The probe of a folder that all nodes must share."""

from __future__ import annotations

import shutil
from pathlib import Path

from gkd.actor.shared_folder import answer, clear, collect, offer
from tests.refusals import refuses


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
