"""Snapshots: copies that training cannot change, in memory that is reused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gkd.actor.common.host_copies import HostCopies
from gkd.actor.common.shard_writer import write
from gkd.actor.common.shards import Piece, ShardReader
from tests.unit.shard_pieces import CPU, WHOLE, address


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
    copies, live = HostCopies(CPU), torch.zeros(16 << 20)
    snapshots = []
    for number in range(1, 6):
        live.fill_(number)
        snapshots.append(copies.snapshot([Piece("w", "param", 0, 0, live)], {}, {}))
        copies.settle()
    live.fill_(0)
    for number, snapshot in enumerate(snapshots, start=1):
        assert all(bool((piece.data == number).all()) for piece in snapshot.pieces)
    with pytest.raises(RuntimeError):  # a copy that fails is not a snapshot
        copies._copy([torch.zeros(3)], [torch.zeros(4)])()
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
