"""Save and load a frozen model that follows its student, as part of the student's checkpoint.

Each rank saves its own rows; any number of ranks can load them. The pieces are in the student's files under a kind of
their own. So they are written, flushed, hashed and committed together, and a checkpoint has both models or neither.
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


def pieces(places: Mapping[str, Place], role: str) -> list[Piece]:
    """Return this rank's rows, as live tensors; rank 0 also has the tensors that are not sharded. No collective.

    Args:
        role: "teacher" | "reference": the kind of the pieces, and their key in the meta data.
    """
    writes_whole = dist.get_rank() == 0
    return [
        Piece(name, role, 0, start, flat)
        for name, start, flat in _local_parts(places)
        if writes_whole or isinstance(places[name].tensor, DTensor)
    ]


def meta(places: Mapping[str, Place], role: str) -> dict[str, Any]:
    """Return the JSON data that must be equal for a checkpoint to match, the same on all ranks."""
    return {role: {name: [_dtype(place.tensor), *place.shape] for name, place in places.items()}}


@torch.no_grad()
def load(folder: Path, places: Mapping[str, Place], role: str) -> None:
    """Load this rank's rows in place. No collective.

    Raises:
        CheckpointError: the checkpoint has no such model or a different one, or cannot be read. The model cannot be
            used afterwards.
    """
    with ShardReader(folder) as reader:
        saved, own = reader.meta.get(role), meta(places, role)[role]
        if saved is None:
            raise CheckpointError(
                f"{folder} has no weights of the {role}, which {role}.update_interval above 0 requires: an "
                "older version wrote it. Fix: start a new run in another trainer.run_dir."
            )
        for name in dict.fromkeys([*own, *saved]):
            in_checkpoint, here = saved.get(name, "missing"), own.get(name, "missing")
            if in_checkpoint != here:
                raise CheckpointError(
                    f"{folder} has a different {role}: {name} is {in_checkpoint} in the checkpoint and {here} here. "
                    f"Fix: restore {role}.path, model.dtype and {role}.update_interval."
                )
        for name, start, flat in _local_parts(places):
            flat.copy_(reader.read(name, role, 0, start, start + flat.numel()))


def _local_parts(places: Mapping[str, Place]) -> Iterator[tuple[str, int, Tensor]]:
    """Yield (name, index of the first element in the flattened tensor, [n] live elements) of this rank's rows.

    Tensors of a dtype that the files do not support, such as integer buffers, are yielded as bytes.
    """
    for name, place in places.items():
        local, row = local_rows(place.tensor)
        flat, per_row = local.detach().view(-1), prod(place.shape[1:])
        if flat.dtype not in DTYPES.values():
            flat, per_row = flat.view(torch.uint8), per_row * flat.itemsize
        yield name, row * per_row, flat


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
