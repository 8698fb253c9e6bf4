"""What an fsdp2 rank puts into a checkpoint, and how any number of ranks gets its own part back out.

fully_shard gives each rank some rows of every parameter: flattened they are one range of the whole, and with the two
moments they are the pieces of `gkd.actor.common.shards`, under the parameters' HF names. Frozen weights are
not in it; they come from the model's folder again. No arithmetic is done on the way: bits stay.

With as many ranks as before the resume is bit-exact, random generators included.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from gkd.actor.common.agree import same_error
from gkd.actor.common.host_copies import HostCopies, Snapshot
from gkd.actor.common.rng import restore_rng, rng_state
from gkd.actor.common.same_student import check_same_student
from gkd.actor.common.shards import KINDS, Piece, ShardReader
from gkd.actor.fsdp.weights import Place, first_row
from gkd.errors import CheckpointError


def snapshot(
    copies: HostCopies, trained: Mapping[str, Place], optimizer: torch.optim.AdamW, meta: Mapping[str, Any]
) -> Snapshot:
    """This rank's share on its way to host memory; `copies.settle` before it changes. No collective.

    Args:
        copies: owns the memory.
        trained: trained parameters by name.
        meta: `student_meta` and the step.
    """
    pieces = []
    for name, start, tensors in _owned(trained, optimizer):
        pieces += [Piece(name, kind, 0, start, tensors[kind]) for kind in KINDS]
    return copies.snapshot(pieces, meta, rng_state())


def load(
    folder: str | Path,
    trained: Mapping[str, Place],
    optimizer: torch.optim.AdamW,
    meta: Mapping[str, Any],
    *,
    rank: int,
    device: torch.device,
) -> int:
    """Fills parameters and optimizer from a checkpoint, and the generators if the world is the same. Collective.

    Returns:
        The number of optimizer steps the checkpoint was saved after.

    Raises:
        CheckpointError: none there, damaged, or of another student; this one is then good for nothing more.
    """
    step = 0
    with same_error(device), ShardReader(folder) as reader:
        _check_trained(folder, reader.meta, meta)
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


def student_meta(
    trained: Mapping[str, Place],
    *,
    dtype: torch.dtype,
    scale: float,
    base: str,
    world_size: int,
    device: torch.device,
) -> dict[str, Any]:
    """What must be equal for a checkpoint to fit, and what decides about the generators; JSON data.

    Args:
        scale: alpha / rank of the adapters; 0 without.
        base: digest of the frozen weights, which are not in the checkpoint; empty where all weights are trained.
    """
    return {
        "strategy": "fsdp2",
        "dtype": str(dtype).removeprefix("torch."),
        "lora_scale": scale,
        "base": base,
        "shapes": {name: list(place.shape) for name, place in trained.items()},
        "world_size": world_size,
        "device": device.type,
    }


def _owned(trained: Mapping[str, Place], optimizer: torch.optim.AdamW) -> Iterator[tuple[str, int, dict[str, Tensor]]]:
    """(name, first element in the flattened whole, live tensors by kind: [n] float32) of what this rank updates."""
    for name, place in trained.items():
        param = place.tensor
        assert isinstance(param, DTensor)
        state = optimizer.state[param]
        if not state:  # before the first step; AdamW would begin with the same
            state["step"] = torch.zeros((), device=param.to_local().device)
            state |= {kind: torch.zeros_like(param, requires_grad=False) for kind in KINDS[1:]}
        tensors = {"param": param, **{kind: state[kind] for kind in KINDS[1:]}}
        start = first_row(param) * (param.numel() // max(1, param.shape[0]))
        yield name, start, {kind: tensor.detach().to_local().view(-1) for kind, tensor in tensors.items()}


def _check_trained(folder: str | Path, saved: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Raises CheckpointError where adapters would stand beside another base, or are not the same ones."""
    if saved.get("base", own["base"]) != own["base"]:
        raise CheckpointError(
            f"{folder} holds adapters of another base model than model.path has now. Name the folder it was begun with."
        )
    shapes = saved.get("shapes", own["shapes"])
    for one, other, who in ((shapes, own["shapes"], "this student"), (own["shapes"], shapes, "the checkpoint")):
        if lacking := sorted(one.keys() - other.keys()):
            raise CheckpointError(
                f"{folder} is of another student: {who} does not train {lacking[0]}. Is it the same model, and are "
                "actor.lora.rank and actor.lora.targets as they were?"
            )
