"""A frozen model that follows its student, in that student's checkpoint: each rank its own rows, any number of ranks.

The pieces stand in the students' own files, under a kind of their own: so they are written, flushed, hashed and
committed with them, and a checkpoint has both or neither.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from gkd.actor.common.shards import DTYPES, Piece, ShardReader
from gkd.actor.fsdp.weights import Place, local_rows
from gkd.errors import CheckpointError

KIND = "teacher"  # of the pieces, and the key of what the meta data say of them


def pieces(places: Mapping[str, Place]) -> list[Piece]:
    """This rank's rows of everything, the live tensors; what is not sharded is rank 0's. No collective."""
    writes_whole = dist.get_rank() == 0
    return [
        Piece(name, KIND, 0, start, flat)
        for name, start, flat in _owned(places)
        if writes_whole or isinstance(places[name].tensor, DTensor)
    ]


def meta(places: Mapping[str, Place]) -> dict[str, Any]:
    """What must be equal for a checkpoint to fit; JSON data, the same on all ranks."""
    return {KIND: {name: [_dtype(place.tensor), *place.shape] for name, place in places.items()}}


@torch.no_grad()
def load(folder: Path, places: Mapping[str, Place]) -> None:
    """Fills this rank's rows, in the memory that they are in. No collective.

    Raises:
        CheckpointError: it holds no teacher, or another one, or cannot be read; then this one is good for nothing more.
    """
    with ShardReader(folder) as reader:
        saved, own = reader.meta.get(KIND), meta(places)[KIND]
        if saved is None:
            raise CheckpointError(
                f"{folder} does not hold the teacher's weights, and with teacher.update_interval above 0 they are none "
                "that a folder has: an older version wrote it. Start a new run in another trainer.run_dir."
            )
        for name in dict.fromkeys([*own, *saved]):
            theirs, ours = saved.get(name, "nothing"), own.get(name, "nothing")
            if theirs != ours:
                raise CheckpointError(
                    f"{folder} holds another teacher: {name} is {theirs} there and {ours} here. Are teacher.path, "
                    "model.dtype and teacher.update_ema as they were?"
                )
        for name, start, flat in _owned(places):
            flat.copy_(reader.read(name, KIND, 0, start, start + flat.numel()))


def _owned(places: Mapping[str, Place]) -> Iterator[tuple[str, int, Tensor]]:
    """(name, first element in the flattened whole, [n] live elements) of what this rank holds.

    Numbers that the files know no dtype for, such as a buffer's integers, are their bytes.
    """
    for name, place in places.items():
        local, row = local_rows(place.tensor)
        flat, per_row = local.detach().view(-1), prod(place.shape[1:])
        if flat.dtype not in DTYPES.values():
            flat, per_row = flat.view(torch.uint8), per_row * flat.itemsize
        yield name, row * per_row, flat


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
