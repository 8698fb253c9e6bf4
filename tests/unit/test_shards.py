"""Checkpoint files of the ranks: snapshots in reused memory, files written in the background, reading, damage."""

from __future__ import annotations

import json
import os
import random
import re
import resource
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import xxhash

from gkd.actor.common.host_copies import HostCopies, Snapshot
from gkd.actor.common.shard_writer import BackgroundWriter, write
from gkd.actor.common.shards import (
    Piece,
    ShardReader,
    check_same_student,
    check_trained,
    file_name,
    restore_rng,
    rng_state,
)
from gkd.errors import CheckpointError
from gkd.memory.host_buffer import HostBuffer
from tests.processes import wait_until
from tests.unit.kills import in_child

CPU = torch.device("cpu")
WHOLE = torch.arange(1000, dtype=torch.float32)


def snapshot_of(*pieces: Piece, step: int = 3, world_size: int = 1) -> Snapshot:
    rng = {"torch": torch.arange(9, dtype=torch.uint8)}
    return HostCopies(CPU).snapshot(pieces, {"step": step, "world_size": world_size}, rng)


def piece_of(start: int, stop: int, *, name: str = "model.w", kind: str = "param", part: int = 0) -> Piece:
    return Piece(name, kind, part, start, WHOLE[start:stop])


def address(snapshot: Snapshot) -> int:
    return snapshot.pieces[0].data.data_ptr()


def test_a_snapshot_is_a_copy_in_reused_memory() -> None:
    """Fails if training can still change a snapshot, or memory is reused before, or not after, its release."""
    copies, live = HostCopies(CPU), torch.ones(100)
    first = copies.snapshot([Piece("w", "param", 0, 0, live)], {}, {})
    copies.settle()
    live.add_(1)
    second = copies.snapshot([Piece("w", "param", 0, 0, live)], {}, {})
    second.wait()
    assert first.pieces[0].data.unique().tolist() == [1.0] and second.pieces[0].data.unique().tolist() == [2.0]
    assert address(first) != address(second)
    first.release()
    third = copies.snapshot([Piece("w", "param", 0, 0, live)], {}, {})
    assert address(third) == address(first)
    third.release()
    bigger = copies.snapshot([Piece("w", "param", 0, 0, torch.ones(1000))], {}, {})
    bigger.wait()
    assert bigger.pieces[0].data.sum() == 1000


def test_live_states_are_written_without_a_copy(tmp_path: Path) -> None:
    """Fails if a save that training waits for takes memory, keeps that of the last one, or fixes the states' place."""
    copies, half = HostCopies(CPU), torch.arange(5, dtype=torch.bfloat16)
    live = [Piece("w", "param", 0, 0, half), Piece("w", "exp_avg", 0, 0, WHOLE.clone())]
    meta = {"step": 1, "world_size": 1}
    copied = copies.snapshot(live, meta, {})
    write(tmp_path / "copied", 0, copied)
    copied.release()
    snapshot = copies.snapshot(live, meta, {}, copies=False)
    assert {piece.data.data_ptr() for piece in snapshot.pieces} == {piece.data.data_ptr() for piece in live}
    assert write(tmp_path / "live", 0, snapshot) == write(tmp_path / "again", 0, copied)
    snapshot.release()
    assert snapshot.buffer.n_bytes == 0 and all(piece.data.untyped_storage().resizable() for piece in live)
    assert address(copies.snapshot(live, meta, {})) != address(copied)


def test_training_waits_only_for_the_copy() -> None:
    """Fails if weights can change before they are copied, or `settle` or the next snapshot waits for the file."""
    copies, live = HostCopies(CPU), torch.zeros(4 << 20)
    snapshots = []
    for number in range(1, 4):
        live.fill_(number)
        snapshots.append(copies.snapshot([Piece("w", "param", 0, 0, live)], {}, {}))
        copies.settle()
    live.fill_(0)
    for number, snapshot in enumerate(snapshots, start=1):
        assert all(bool((piece.data == number).all()) for piece in snapshot.pieces)
    with pytest.raises(RuntimeError):  # a copy that fails is not a snapshot
        copies.snapshot([Piece("w", "param", 0, 0, torch.empty(4, device="meta"))], {}, {}).wait()
    with pytest.raises(RuntimeError):
        copies.settle()


def test_pieces_are_contiguous_in_slabs(tmp_path: Path) -> None:
    """Fails if more than the end of the last slab is unused, or an empty or split piece is damaged."""
    live = [
        Piece("half", "param", 0, 3, torch.arange(101, dtype=torch.bfloat16)),
        Piece("none", "param", 0, 7, torch.zeros(0)),
        *(Piece(f"w{i}", "exp_avg", 1, 10 * i, WHOLE[i : 400 + 37 * i].clone()) for i in range(8)),
        Piece("bytes", "param", 0, 0, torch.arange(33, dtype=torch.uint8)),
        Piece("double", "param", 0, 0, WHOLE.double()),
    ]
    n_bytes = sum(piece.data.nbytes for piece in live)
    snapshot = HostCopies(CPU, slab_bytes=1024).snapshot(live, {"step": 1, "world_size": 1}, {})
    assert snapshot.buffer.n_bytes == -(-n_bytes // 1024) * 1024
    write(tmp_path, 0, snapshot)
    with ShardReader(tmp_path) as reader:
        for piece in live:
            if piece.name != "none":
                stop = piece.start + piece.data.numel()
                values = reader.read(piece.name, piece.kind, piece.part, piece.start, stop)
                assert torch.equal(values, piece.data), piece.name
        assert {name for name, _, _ in reader.index} == {piece.name for piece in live} - {"none"}


def test_two_snapshots_go_into_one_file(tmp_path: Path) -> None:
    """Fails if the joined snapshot is written before it is copied, lacks its meta data, or keeps its memory."""
    student, teacher = HostCopies(CPU), HostCopies(CPU)
    first = student.snapshot([Piece("w", "param", 0, 0, WHOLE)], {"step": 1, "world_size": 1}, {})
    second = teacher.snapshot([Piece("w", "teacher", 0, 0, WHOLE.bfloat16())], {"teacher": 2}, {})
    both = first.join(second)
    write(tmp_path, 0, both)
    both.release()
    with ShardReader(tmp_path) as reader:
        assert reader.meta == {"step": 1, "world_size": 1, "teacher": 2}
        assert torch.equal(reader.read("w", "param", 0, 0, len(WHOLE)), WHOLE)
        assert torch.equal(reader.read("w", "teacher", 0, 0, len(WHOLE)), WHOLE.bfloat16())
    for copies, before in ((student, first), (teacher, second)):
        assert address(copies.snapshot([Piece("w", "param", 0, 0, WHOLE)], {}, {})) == address(before)


def test_files_are_safetensors_with_correct_digests(tmp_path: Path) -> None:
    """Fails if other tools cannot open a rank's file, or the digest or size differs from the bytes on disk."""
    digests = write(tmp_path / "new", 0, snapshot_of(piece_of(0, 1000)))
    path = tmp_path / "new" / file_name(0)
    assert torch.equal(safetensors.torch.load_file(path)["model.w/param/0/0"], WHOLE)
    data = path.read_bytes()
    assert list(digests) == [path.name]
    assert digests[path.name].n_bytes == len(data)
    assert digests[path.name].xxh3_128 == xxhash.xxh3_128_hexdigest(data)
    with safetensors.safe_open(path, "pt") as file:
        assert json.loads(file.metadata()["gkd"]) == {"step": 3, "world_size": 1, "format": 1, "rank": 0}


def test_the_background_writer_writes_one_at_a_time(tmp_path: Path) -> None:
    """Fails if a poll returns too early, the result is lost, or two saves overlap."""
    writer = BackgroundWriter()
    with pytest.raises(CheckpointError):
        writer.finished(wait=False)
    os.mkfifo(tmp_path / file_name(0))  # its writer blocks until all is read: a slow save
    writer.start(tmp_path, 0, snapshot_of(Piece("w", "param", 0, 0, torch.zeros(1 << 20))))
    with (tmp_path / file_name(0)).open("rb") as slow:  # waits for the writer
        assert writer.finished(wait=False) is None
        with pytest.raises(CheckpointError, match=f"{tmp_path} "):
            writer.start(tmp_path / "other", 0, snapshot_of(piece_of(0, 10)))
        slow.read()
    with pytest.raises(CheckpointError):  # a pipe has no fsync
        writer.finished(wait=True)
    writer.start(tmp_path / "other", 0, snapshot_of(piece_of(0, 10)))
    digests = writer.finished(wait=True)
    assert digests is not None and digests == writer.finished(wait=False)
    assert digests[file_name(0)].n_bytes == (tmp_path / "other" / file_name(0)).stat().st_size


def test_the_next_save_may_start_after_the_result_of_the_last(tmp_path: Path) -> None:
    """Fails if a result is returned before the writer accepts the next save, or before the memory is free."""

    both = threading.Barrier(2, timeout=10.0)

    class SlowCopies(HostCopies):
        def give_back(self, buffer: HostBuffer) -> None:
            both.wait()  # the test may look
            both.wait()  # it has looked
            super().give_back(buffer)

    writer, copies, addresses = BackgroundWriter(), SlowCopies(CPU), set()
    for _ in range(3):
        snapshot = copies.snapshot([piece_of(0, 10)], {"step": 1, "world_size": 1}, {})
        addresses.add(address(snapshot))
        writer.start(tmp_path, 0, snapshot)
        both.wait()
        assert writer.finished(wait=False) is None
        both.wait()
        writer.finished(wait=True)
    assert len(addresses) == 1


def test_the_writer_has_a_lower_priority_than_training(tmp_path: Path) -> None:
    """Fails if the writer thread has the priority of the training thread, lowers that one, too, or is waited for by a
    process that ends.
    """
    writer, before = BackgroundWriter(), os.getpriority(os.PRIO_PROCESS, 0)
    os.mkfifo(tmp_path / file_name(0))
    writer.start(tmp_path, 0, snapshot_of(piece_of(0, 1000)))
    (thread,) = (thread for thread in threading.enumerate() if thread.name == "checkpoint")
    assert thread.daemon
    lower = min(19, before + 10)
    wait_until(lambda: os.getpriority(os.PRIO_PROCESS, thread.native_id or 0) == lower, 30.0, "a lower priority")
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


def _write_two_ranks(folder: Path) -> None:
    """Write elements 0:300 and 700:1000 as rank 0, 300:700 and a tensor of its own as rank 1."""
    own = Piece("model.norm", "exp_avg", 1, 5, torch.full((4,), 0.5, dtype=torch.bfloat16))
    write(folder, 0, snapshot_of(piece_of(700, 1000), piece_of(0, 300), world_size=2))
    write(folder, 1, snapshot_of(piece_of(300, 700), own, world_size=2))


def test_round_trip(tmp_path: Path) -> None:
    """Fails if a range across pieces and files, a dtype, a generator's state or the meta data are changed."""
    _write_two_ranks(tmp_path)
    with ShardReader(tmp_path) as reader:
        for start, stop in ((0, 1000), (0, 300), (299, 301), (650, 800), (999, 1000), (12, 12)):
            assert torch.equal(reader.read("model.w", "param", 0, start, stop), WHOLE[start:stop])
        own = reader.read("model.norm", "exp_avg", 1, 5, 9)
        assert own.dtype == torch.bfloat16 and own.tolist() == [0.5] * 4
        target = torch.zeros(10)
        reader.read("model.w", "param", 0, 295, 305, out=target)
        assert torch.equal(target, WHOLE[295:305])
        for wrong in (torch.zeros(9), torch.zeros(10, dtype=torch.bfloat16)):
            with pytest.raises(CheckpointError):
                reader.read("model.w", "param", 0, 295, 305, out=wrong)
        assert reader.meta == {"step": 3, "world_size": 2}
        assert {name for name, _, _ in reader.index} == {"model.w", "model.norm"}
        assert reader.rng(1)["torch"].tolist() == list(range(9)) and reader.rng(2) == {}


DAMAGE: dict[str, Callable[[bytearray], bytearray]] = {
    "empty": lambda data: data[:0],
    "data cut": lambda data: data[:-10],
    "flipped": lambda data: data[: len(data) // 8] + b"\xff" + data[len(data) // 8 + 1 :],  # in the header
    "huge header": lambda data: bytearray(b"\xff" * 8) + data[8:],
    "another format": lambda data: data.replace(b'format\\": 1', b'format\\": 9'),
    "other sizes": lambda data: bytearray(re.sub(rb'("shape": ?)\[4\]', rb"\1[5]", data)),
    "no meta": lambda data: bytearray((2).to_bytes(8, "little") + b"{}"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_file_is_named(tmp_path: Path, kind: str) -> None:
    """Fails if a damaged file is accepted, raises another error than CheckpointError, or is not named in it."""
    _write_two_ranks(tmp_path)
    path = tmp_path / file_name(1)
    path.write_bytes(DAMAGE[kind](bytearray(path.read_bytes())))
    with pytest.raises(CheckpointError, match=file_name(1)):
        ShardReader(tmp_path)


def test_gaps_overlaps_and_mixed_checkpoints_are_refused(tmp_path: Path) -> None:
    """Fails if missing elements are invented, overlapping pieces pass, or files of two saves are mixed."""
    with pytest.raises(ValueError, match="rank 0"):
        write(tmp_path, 0, snapshot_of(piece_of(0, 10), piece_of(0, 20)))
    _write_two_ranks(tmp_path)
    with ShardReader(tmp_path) as reader:
        for args, expected in (
            (("model.v", "param", 0, 0, 1), "param of model.v"),
            (("model.w", "exp_avg", 0, 0, 1), "exp_avg of model.w"),
            (("model.w", "param", 1, 0, 1), "part 1"),
            (("model.w", "param", 0, 900, 1001), "1000 of param of model.w"),
            (("model.norm", "exp_avg", 1, 0, 9), "0 of exp_avg of model.norm"),
        ):
            with pytest.raises(CheckpointError, match=expected):
                reader.read(*args)
    write(tmp_path, 1, snapshot_of(piece_of(300, 600), world_size=2))
    with ShardReader(tmp_path) as reader, pytest.raises(CheckpointError):
        reader.read("model.w", "param", 0, 0, 1000)
    write(tmp_path, 1, snapshot_of(piece_of(300, 701), world_size=2))
    with pytest.raises(CheckpointError):
        ShardReader(tmp_path)
    write(tmp_path, 1, snapshot_of(piece_of(300, 700), world_size=2, step=4))
    with pytest.raises(CheckpointError, match=file_name(1)):
        ShardReader(tmp_path)


def test_missing_files_are_named(tmp_path: Path) -> None:
    """Fails if a folder without all ranks' files, or without any, is opened."""
    with pytest.raises(CheckpointError, match=file_name(0)):
        ShardReader(tmp_path / "nothing")
    _write_two_ranks(tmp_path)
    (tmp_path / file_name(1)).rename(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError):
        ShardReader(tmp_path)
    (tmp_path / file_name(0)).rename(tmp_path / file_name(1))
    with pytest.raises(CheckpointError, match=file_name(0)):
        ShardReader(tmp_path)


def test_a_file_truncated_after_opening_is_named(tmp_path: Path) -> None:
    """Fails if a file that is truncated while open kills the process or returns wrong elements."""
    write(tmp_path, 0, snapshot_of(piece_of(0, 1000)))
    with ShardReader(tmp_path) as reader:
        os.truncate(tmp_path / file_name(0), 2000)
        with pytest.raises(CheckpointError):
            reader.read("model.w", "param", 0, 0, 1000)


OWN: dict[str, Any] = {"strategy": "fsdp2", "dtype": "bfloat16", "shapes": {"a": [2, 3], "b": [4]}, "world_size": 2}
SAVED = OWN | {"step": 7, "world_size": 4}


def _check(saved: dict[str, Any]) -> None:
    check_same_student("ckpt", saved, OWN, settings=("strategy", "dtype"), model="shapes")


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ({"strategy": "megatron"}, "strategy = megatron.* fsdp2"),
        ({"shapes": {"a": [2, 3], "b": [5]}}, r"b = \[5\].* \[4\]"),
        ({"shapes": {"a": [2, 3]}}, "the checkpoint does not train b"),
        ({"shapes": {"a": [2, 3], "b": [4], "c": [1]}}, "this student does not train c"),
    ],
)
def test_a_different_student_is_refused(change: dict[str, Any], difference: str) -> None:
    """Fails if a checkpoint of a different student passes, or one of another number of ranks is refused."""
    _check(SAVED)
    with pytest.raises(CheckpointError, match=f"ckpt .*{difference}"):
        _check(SAVED | change)


@pytest.mark.parametrize(
    ("saved", "own", "named"),
    [
        ({"base": "x", "shapes": {"a": [1]}}, {}, "actor.lora.rank"),
        ({"base": "x", "shapes": {"a": [1]}}, {"base": "y", "shapes": {"a": [1]}}, "model.path"),
        ({"base": "x", "shapes": {"a": [1]}}, {"base": "x", "shapes": {"b": [1]}}, "does not train a"),
    ],
)
def test_other_adapters_are_refused(saved: dict[str, Any], own: dict[str, Any], named: str) -> None:
    """Fails if adapters are resumed with other base weights, as all weights, or for other layers."""
    check_trained("ckpt", saved, saved)
    with pytest.raises(CheckpointError, match=named):
        check_trained("ckpt", saved, own)


def test_incomplete_meta_data_are_refused() -> None:
    """Fails if meta data of another origin raise a KeyError."""
    with pytest.raises(CheckpointError):
        _check({key: value for key, value in SAVED.items() if key not in ("dtype", "step")})


def test_restored_generators_continue() -> None:
    """Fails if a restored generator of Python, numpy or torch draws different numbers, its cached Gaussian included."""

    def draw() -> list[float]:
        return [random.random(), random.gauss(), float(np.random.randn()), float(torch.randn(1))]

    before = rng_state()
    draw()  # leaves a second Gaussian of Python's and numpy's cached
    states = rng_state()
    expected = draw()
    restore_rng(states, "rng.pt")
    assert draw() == expected
    states["numpy"] = states["python"]
    with pytest.raises(CheckpointError):
        restore_rng(states, "rng.pt")
    restore_rng(before, "here")
