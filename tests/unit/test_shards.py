"""Checkpoint files of the ranks: read back what was written; refuse damage of every kind. Real files."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from gkd.actor.common.shard_writer import write
from gkd.actor.common.shards import Piece, ShardReader, file_name
from gkd.errors import CheckpointError
from tests.unit.shard_pieces import WHOLE, piece_of, snapshot_of


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


def _flip(data: bytearray) -> bytearray:
    data[len(data) // 8] = 0xFF  # in the header
    return data


DAMAGE: dict[str, Callable[[bytearray], bytearray]] = {
    "empty": lambda data: data[:0],
    "header cut": lambda data: data[:100],
    "data cut": lambda data: data[:-10],
    "longer": lambda data: data + b"x",
    "flipped": _flip,
    "huge header": lambda data: bytearray(b"\xff" * 8) + data[8:],
    "other JSON": lambda data: bytearray((2).to_bytes(8, "little") + b"[]"),
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


def test_random_damage_of_a_header_raises_checkpoint_errors(tmp_path: Path) -> None:
    """Fails if a damaged header raises anything but CheckpointError, on opening or reading."""
    write(tmp_path, 0, snapshot_of(piece_of(0, 1000)))
    path, rng = tmp_path / file_name(0), random.Random(5)
    whole = path.read_bytes()
    n_header = 8 + int.from_bytes(whole[:8], "little")
    refused = 0
    for _ in range(500):
        data = bytearray(whole)
        for _ in range(rng.randint(1, 3)):
            data[rng.randrange(n_header)] = rng.choice(b'0123456789{}[]",:-.eFx\x00\xff')
        path.write_bytes(data)
        try:
            with ShardReader(tmp_path) as reader:
                reader.read("model.w", "param", 0, 0, 1000)
        except CheckpointError:
            refused += 1
    assert refused > 400  # the others changed only blanks or the meta data, whose digest is in the manifest


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
