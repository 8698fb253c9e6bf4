"""Pieces and snapshots for the tests of a checkpoint's files."""

from __future__ import annotations

import torch

from gkd.actor.common.host_copies import HostCopies, Snapshot
from gkd.actor.common.shards import Piece

CPU = torch.device("cpu")
WHOLE = torch.arange(1000, dtype=torch.float32)


def snapshot_of(*pieces: Piece, step: int = 3, world_size: int = 1) -> Snapshot:
    rng = {"torch": torch.arange(9, dtype=torch.uint8)}
    return HostCopies(CPU).snapshot(pieces, {"step": step, "world_size": world_size}, rng)


def piece_of(start: int, stop: int, *, name: str = "model.w", kind: str = "param", part: int = 0) -> Piece:
    return Piece(name, kind, part, start, WHOLE[start:stop])


def address(snapshot: Snapshot) -> int:
    return snapshot.pieces[0].data.data_ptr()
