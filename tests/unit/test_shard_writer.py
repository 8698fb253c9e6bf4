"""Writing of one rank's file in the background: complete with a digest, or an error with the cause. Real files."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
import safetensors.torch
import torch
import xxhash

from gkd.actor.common.host_copies import HostCopies
from gkd.actor.common.shard_writer import BackgroundWriter, write
from gkd.actor.common.shards import ShardReader, file_name
from gkd.errors import CheckpointError
from gkd.memory.host_buffer import HostBuffer
from tests.processes import wait_until
from tests.unit.kills import in_child
from tests.unit.shard_pieces import CPU, WHOLE, address, piece_of, snapshot_of


def test_files_are_safetensors_with_correct_digests(tmp_path: Path) -> None:
    """Fails if other tools cannot open a rank's file, or the digest or size differs from the bytes on disk."""
    digests = write(tmp_path / "new", 0, snapshot_of(piece_of(0, 1000)))
    path = tmp_path / "new" / file_name(0)
    tensors = safetensors.torch.load_file(path)
    assert torch.equal(tensors["model.w/param/0/0"], WHOLE)
    data = path.read_bytes()
    assert list(digests) == [path.name]
    assert digests[path.name].n_bytes == len(data)
    assert digests[path.name].xxh3_128 == xxhash.xxh3_128_hexdigest(data)


def test_headers_hold_the_meta_data_as_json(tmp_path: Path) -> None:
    """Fails if only this project can read a checkpoint's meta data."""
    write(tmp_path, 0, snapshot_of(piece_of(0, 10)))
    with safetensors.safe_open(tmp_path / file_name(0), "pt") as file:
        assert json.loads(file.metadata()["gkd"]) == {"step": 3, "world_size": 1, "format": 1, "rank": 0}


def test_the_background_writer_writes_one_at_a_time(tmp_path: Path) -> None:
    """Fails if a poll returns too early, the result is lost, or two saves overlap."""
    writer = BackgroundWriter()
    with pytest.raises(CheckpointError):
        writer.finished(wait=False)
    os.mkfifo(tmp_path / file_name(0))  # its writer blocks until it is read: a slow save
    writer.start(tmp_path, 0, snapshot_of(piece_of(0, 1000)))
    time.sleep(0.05)
    assert writer.finished(wait=False) is None
    with pytest.raises(CheckpointError, match=f"{tmp_path} "):
        writer.start(tmp_path / "other", 0, snapshot_of(piece_of(0, 10)))
    (tmp_path / file_name(0)).read_bytes()
    with pytest.raises(CheckpointError):  # a pipe has no fsync
        writer.finished(wait=True)
    writer.start(tmp_path / "other", 0, snapshot_of(piece_of(0, 10)))
    digests = writer.finished(wait=True)
    assert digests is not None and digests == writer.finished(wait=False)
    assert digests[file_name(0)].n_bytes == (tmp_path / "other" / file_name(0)).stat().st_size


def test_the_next_save_may_start_after_the_result_of_the_last(tmp_path: Path) -> None:
    """Fails if a result is returned before the writer accepts the next save, or before the memory is free."""

    class SlowCopies(HostCopies):
        def give_back(self, buffer: HostBuffer) -> None:
            time.sleep(0.05)
            super().give_back(buffer)

    writer, copies, addresses = BackgroundWriter(), SlowCopies(CPU), set()
    for _ in range(5):
        snapshot = copies.snapshot([piece_of(0, 10)], {"step": 1, "world_size": 1}, {})
        addresses.add(address(snapshot))
        writer.start(tmp_path, 0, snapshot)
        while writer.finished(wait=False) is None:  # at once after the result: no pause
            pass
    assert len(addresses) == 1


def test_the_writer_has_a_lower_priority_than_training(tmp_path: Path) -> None:
    """Fails if the writer thread has the priority of the training thread, or lowers that one, too."""
    writer, before = BackgroundWriter(), os.getpriority(os.PRIO_PROCESS, 0)
    os.mkfifo(tmp_path / file_name(0))
    writer.start(tmp_path, 0, snapshot_of(piece_of(0, 1000)))
    (thread,) = (thread for thread in threading.enumerate() if thread.name == "checkpoint")
    wait_until(lambda: os.getpriority(os.PRIO_PROCESS, thread.native_id or 0) != before, 10.0, "another priority")
    assert os.getpriority(os.PRIO_PROCESS, thread.native_id or 0) == min(19, before + 10)
    assert os.getpriority(os.PRIO_PROCESS, 0) == before
    (tmp_path / file_name(0)).read_bytes()
    with pytest.raises(CheckpointError):
        writer.finished(wait=True)


def test_a_rank_creates_its_folder_but_no_parent(tmp_path: Path) -> None:
    """Fails if a rank that outlived its run recreates a removed folder, or the error lacks the setting."""
    with pytest.raises(CheckpointError, match="rank 3 .*gone/ranks.*trainer.run_dir"):
        write(tmp_path / "gone" / "ranks", 3, snapshot_of(piece_of(0, 10)))
    assert not (tmp_path / "gone").exists()


def test_the_writer_releases_the_memory(tmp_path: Path) -> None:
    """Fails if a snapshot's memory is not reused after a save that succeeded or failed."""
    copies, writer = HostCopies(CPU), BackgroundWriter()
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "good", tmp_path / "file" / "bad", tmp_path / "again"):
        snapshot = copies.snapshot([piece_of(0, 1000)], {"step": 1, "world_size": 1}, {})
        first = address(snapshot)
        writer.start(folder, 0, snapshot)
        if "bad" in folder.name:
            with pytest.raises(CheckpointError):
                writer.finished(wait=True)
        else:
            writer.finished(wait=True)
        after = copies.snapshot([piece_of(0, 1000)], {}, {})
        assert address(after) == first, folder
        after.release()


def test_read_only_and_full_devices_are_named(tmp_path: Path) -> None:
    """Fails if a failed write raises no error, or its error lacks the path or the system's message."""
    with pytest.raises(CheckpointError, match="/sys/.*rank_00000.safetensors"):
        write(Path("/sys"), 0, snapshot_of(piece_of(0, 10)))
    (tmp_path / file_name(0)).symlink_to("/dev/full")
    with pytest.raises(CheckpointError):
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


def test_a_file_size_limit_fails_the_save(tmp_path: Path) -> None:
    """Fails if an incomplete file is accepted as complete."""

    def on_a_small_disk() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 10, 1 << 10))
        with pytest.raises(CheckpointError, match=r"rank 0.*File too large"):
            write(tmp_path, 0, snapshot_of(piece_of(0, 1000)))

    assert in_child(on_a_small_disk) == 0
    assert (tmp_path / file_name(0)).stat().st_size == 1 << 10
    with pytest.raises(CheckpointError):
        ShardReader(tmp_path)


def test_a_process_may_end_while_it_writes(tmp_path: Path) -> None:
    """Fails if a process that ends waits for its disk."""
    os.mkfifo(tmp_path / file_name(0))  # it is never read, so the write never ends
    command = [sys.executable, "-c", textwrap.dedent(_CHILD) + "print('over')", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0 and done.stdout == "over\n", done.stderr
