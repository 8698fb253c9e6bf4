"""Write the state of an fsdp2 rank to a checkpoint, and load it with any number of ranks.

fully_shard gives each rank some rows of every parameter. Flattened, they are one range of the parameter. These ranges
and the moments' ranges are the pieces of `gkd.actor.common.shards`, under the parameters' HF names. Frozen weights
are not saved; a resume reads them from the model's folder. Values are copied bit-exactly.

With the same number of ranks the resume is bit-exact, including the random generators.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from gkd.actor.common.agree import same_error
from gkd.actor.common.shards import KINDS, Piece, ShardReader, check_same_student, restore_rng
from gkd.actor.fsdp.weights import Place, flat_rows


def pieces(trained: Mapping[str, Place], optimizer: torch.optim.AdamW) -> list[Piece]:
    """Return this rank's ranges of the trained parameters and of their moments, as live tensors. No collective."""
    return [Piece(name, kind, 0, start, own[kind]) for name, start, own in _owned(trained, optimizer) for kind in KINDS]


def load(
    folder: str | Path,
    trained: Mapping[str, Place],
    optimizer: torch.optim.AdamW,
    meta: Mapping[str, Any],
    *,
    rank: int,
    device: torch.device,
) -> int:
    """Load parameters and optimizer from a checkpoint; the generators, too, if the world is the same. Collective.

    Returns:
        The number of optimizer steps after which the checkpoint was saved.

    Raises:
        CheckpointError: there is none, or it is damaged or belongs to another student. The student cannot be used
            afterwards.
    """
    step = 0
    with same_error(device), ShardReader(folder) as reader:
        settings = ("strategy", "dtype", "lora_scale", "base")
        check_same_student(folder, reader.meta, meta, settings=settings, model="shapes")
        step = int(reader.meta["step"])
        with torch.no_grad():
            for name, start, tensors in _owned(trained, optimizer):
                for kind, tensor in tensors.items():
                    tensor.copy_(reader.read(name, kind, 0, start, start + tensor.numel()))
        for place in trained.values():
            optimizer.state[place.tensor]["step"].fill_(step)
        if reader.meta["world_size"] == meta["world_size"] and reader.meta["device"] == meta["device"]:
            restore_rng(reader.rng(rank), folder)
    return step


def _owned(trained: Mapping[str, Place], optimizer: torch.optim.AdamW) -> Iterator[tuple[str, int, dict[str, Tensor]]]:
    """Yield (name, offset in the flattened parameter, live [n] float32 tensors by kind) of this rank's shards."""
    for name, place in trained.items():
        param = place.tensor
        assert isinstance(param, DTensor)
        state = optimizer.state[param]
        if not state:  # before the first step; AdamW starts with the same values
            state["step"] = torch.zeros((), device=param.to_local().device)
            state |= {kind: torch.zeros_like(param, requires_grad=False) for kind in KINDS[1:]}
        tensors = {"param": param, **{kind: state[kind] for kind in KINDS[1:]}}
        flat = {kind: flat_rows(tensor) for kind, tensor in tensors.items()}
        yield name, flat["param"][0], {kind: elements for kind, (_, elements) in flat.items()}
