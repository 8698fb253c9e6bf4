"""One rank's file is written: whole and digested, or with the reason why not, in the background. Real files."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import safetensors.torch
import torch
import xxhash

from gkd.actor.common.host_copies import HostCopies
from gkd.actor.common.shard_writer import BackgroundWriter, write
from gkd.actor.common.shards import ShardReader, file_name
from gkd.errors import CheckpointError
from tests.unit.shard_pieces import CPU, WHOLE, address, piece_of, snapshot_of


def test_files_are_safetensors_and_digests_are_theirs(tmp_path: Path) -> None:
    """Fails if other tools cannot open a rank's file, or its digest or size is not that of the bytes on disk."""
    digests = write(tmp_path / "new", 0, snapshot_of(piece_of(0, 1000)))
    path = tmp_path / "new" / file_name(0)
    tensors = safetensors.torch.load_file(path)
    assert torch.equal(tensors["model.w/param/0/0"], WHOLE)
    data = path.read_bytes()
    assert list(digests) == [path.name]
    assert digests[path.name].n_bytes == len(data)
    assert digests[path.name].xxh3_128 == xxhash.xxh3_128_hexdigest(data)


def test_headers_hold_the_meta_data_as_json(tmp_path: Path) -> None:
    """Fails if what a checkpoint says of itself can be read by this project only."""
    write(tmp_path, 0, snapshot_of(piece_of(0, 10)))
    with safetensors.safe_open(tmp_path / file_name(0), "pt") as file:
        assert json.loads(file.metadata()["gkd"]) == {"step": 3, "world_size": 1, "format": 1, "rank": 0}


def test_the_background_writer_writes_one_at_a_time(tmp_path: Path) -> None:
    """Fails if a poll says "done" too early, the answer gets lost, or two saves run into each other."""
    writer = BackgroundWriter()
    with pytest.raises(CheckpointError, match="no save was started"):
        writer.finished(wait=False)
    os.mkfifo(tmp_path / file_name(0))  # its writer waits until somebody reads: a save as slow as this test wants
    writer.start(tmp_path, 0, snapshot_of(piece_of(0, 1000)))
    time.sleep(0.05)
    assert writer.finished(wait=False) is None
    with pytest.raises(CheckpointError, match=f"save to {tmp_path} is still being written"):
        writer.start(tmp_path / "other", 0, snapshot_of(piece_of(0, 10)))
    (tmp_path / file_name(0)).read_bytes()
    with pytest.raises(CheckpointError, match="rank 0 cannot write .*Invalid argument"):  # a pipe has no fsync
        writer.finished(wait=True)
    writer.start(tmp_path / "other", 0, snapshot_of(piece_of(0, 10)))
    digests = writer.finished(wait=True)
    assert digests is not None and digests == writer.finished(wait=False)
    assert digests[file_name(0)].n_bytes == (tmp_path / "other" / file_name(0)).stat().st_size


def test_the_next_save_may_begin_once_the_last_has_its_answer(tmp_path: Path) -> None:
    """Fails if "done" can be seen before the writer is ready for the next save, or before the memory is free."""

    class SlowCopies(HostCopies):
        def give_back(self, slabs: Sequence[torch.Tensor]) -> None:
            time.sleep(0.05)
            super().give_back(slabs)

    writer, copies, addresses = BackgroundWriter(), SlowCopies(CPU), set()
    for _ in range(5):
        snapshot = copies.snapshot([piece_of(0, 10)], {"step": 1, "world_size": 1}, {})
        addresses.add(address(snapshot))
        writer.start(tmp_path, 0, snapshot)
        while writer.finished(wait=False) is None:
            time.sleep(0)
    assert len(addresses) == 1


def test_the_writer_gives_way_to_training(tmp_path: Path) -> None:
    """Fails if the writing thread is as urgent as the training one, or its lower priority spreads to that."""
    writer, before = BackgroundWriter(), os.getpriority(os.PRIO_PROCESS, 0)
    os.mkfifo(tmp_path / file_name(0))
    writer.start(tmp_path, 0, snapshot_of(piece_of(0, 1000)))
    (thread,) = (thread for thread in threading.enumerate() if thread.name == "checkpoint")
    deadline = time.monotonic() + 10
    while (priority := os.getpriority(os.PRIO_PROCESS, thread.native_id or 0)) == before:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert priority == min(19, before + 10) and os.getpriority(os.PRIO_PROCESS, 0) == before
    (tmp_path / file_name(0)).read_bytes()
    with pytest.raises(CheckpointError, match="Invalid argument"):
        writer.finished(wait=True)


def test_a_rank_makes_its_folder_and_no_parent(tmp_path: Path) -> None:
    """Fails if a rank that outlived its run brings a removed folder back, or an unshared disk is not named."""
    with pytest.raises(CheckpointError, match="rank 3 .*gone/ranks.* does not see the folder's parent.*run_dir"):
        write(tmp_path / "gone" / "ranks", 3, snapshot_of(piece_of(0, 10)))
    assert not (tmp_path / "gone").exists()


def test_the_writer_releases_the_memory(tmp_path: Path) -> None:
    """Fails if a snapshot's memory is not free for the next one after a save, good or bad."""
    copies, writer = HostCopies(CPU), BackgroundWriter()
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "good", tmp_path / "file" / "bad", tmp_path / "again"):
        snapshot = copies.snapshot([piece_of(0, 1000)], {"step": 1, "world_size": 1}, {})
        place = address(snapshot)
        writer.start(folder, 0, snapshot)
        if "bad" in folder.name:
            with pytest.raises(CheckpointError, match="Not a directory"):
                writer.finished(wait=True)
        else:
            writer.finished(wait=True)
        after = copies.snapshot([piece_of(0, 1000)], {}, {})
        assert address(after) == place, folder
        after.release()


def test_read_only_and_full_devices_are_named(tmp_path: Path) -> None:
    """Fails if a target that cannot be written passes, or its error lacks the path or the system's reason."""
    with pytest.raises(CheckpointError, match="/sys/.*rank_00000.safetensors"):
        write(Path("/sys"), 0, snapshot_of(piece_of(0, 10)))
    (tmp_path / file_name(0)).symlink_to("/dev/full")
    with pytest.raises(CheckpointError, match="No space left on device"):
        write(tmp_path, 0, snapshot_of(piece_of(0, 1000)))


_CHILD = """
    import sys, torch
    from pathlib import Path
    from gkd.actor.common.shard_writer import BackgroundWriter
    from gkd.actor.common.host_copies import HostCopies
    from gkd.actor.common.shards import Piece

    pieces = [Piece("w", "param", 0, 0, torch.ones(1_000_000))]
    snapshot = HostCopies(torch.device("cpu")).snapshot(pieces, {"step": 1, "world_size": 1}, {})
    writer = BackgroundWriter()
    writer.start(Path(sys.argv[1]), 0, snapshot)
"""


def _child(code: str, folder: Path, limit_bytes: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(_CHILD) + code, str(folder)],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes)),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_file_that_may_not_grow_ends_the_save_with_its_reason(tmp_path: Path) -> None:
    """Fails if a save that stops in the middle of its file is taken for a whole one."""
    done = _child("writer.finished(wait=True)", tmp_path, 1 << 20)
    assert "CheckpointError: rank 0 cannot write" in done.stderr and "File too large" in done.stderr
    assert (tmp_path / file_name(0)).stat().st_size == 1 << 20
    with pytest.raises(CheckpointError, match="cut off"):
        ShardReader(tmp_path)


def test_a_process_may_end_while_it_writes(tmp_path: Path) -> None:
    """Fails if a process that ends, for whatever reason, waits for its disk."""
    os.mkfifo(tmp_path / file_name(0))  # nobody reads it, so the write never ends
    done = _child("print('over')", tmp_path, resource.RLIM_INFINITY)
    assert done.returncode == 0 and done.stdout == "over\n", done.stderr
