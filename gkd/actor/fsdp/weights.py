"""A HF folder's tensors -> this rank's shards, and back: full tensors under the names of the files.

One parameter at a time in both directions. A rank reads only its own rows from the files.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from gkd.actor.fsdp.conversion import FilePart, file_parts
from gkd.errors import ModelError
from gkd.hf.files import check_headers, open_tensors


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor of the files lives: fully_shard replaces parameters, but not the modules that hold them."""

    module: nn.Module
    attribute: str
    shape: tuple[int, ...]  # of the whole tensor
    parts: tuple[FilePart, ...] = ()  # the files' tensors in it; of an adapter none

    @property
    def tensor(self) -> Tensor:
        tensor: Tensor = getattr(self.module, self.attribute)
        return tensor


def named_places(hf: PreTrainedModel) -> tuple[dict[str, Place], dict[str, tuple[int, ...]]]:
    """The model's parameters and persistent buffers by name; further names of the shared ones, with their shapes."""
    places: dict[str, Place] = {}
    aliases: dict[str, tuple[int, ...]] = {}
    seen: set[int] = set()
    for path, module in hf.named_modules():
        kept = {k: b for k, b in module._buffers.items() if k not in module._non_persistent_buffers_set}
        for attribute, tensor in {**module._parameters, **kept}.items():
            if tensor is None:
                continue
            name = f"{path}.{attribute}"
            if id(tensor) in seen:
                aliases[name] = tuple(tensor.shape)
            else:
                seen.add(id(tensor))
                places[name] = Place(module, attribute, tuple(tensor.shape))
    return places, aliases


def match_files(hf: PreTrainedModel, folder: Path, tensors: Mapping[str, Any]) -> dict[str, Place]:
    """Place of each tensor of the model, by its name there, with the folder's tensors in it; reads headers only.

    Args:
        hf: as `build_on_meta` made it, not yet sharded.
        tensors: as `open_tensors` gives them.

    Raises:
        ModelError: tensors are missing, unexpected, of the wrong shape or quantised; names them. Or they are converted
            on load in a way that is not done here.
    """
    places, aliases = named_places(hf)
    try:
        parts = file_parts(hf, tensors, {name: place.shape for name, place in places.items()} | aliases)
    except ModelError as error:
        raise ModelError(f"{folder}: {error}") from error
    repeated = {part.name for name in aliases for part in parts.get(name, [])}
    ignored = tuple(hf._keys_to_ignore_on_load_unexpected or ())

    def is_ignorable(name: str) -> bool:
        by_model = any(re.search(pattern, name) for pattern in ignored)
        return name in repeated or name.endswith("rotary_emb.inv_freq") or by_model

    shapes: dict[str, tuple[int, ...]] = {}
    floats: set[str] = set()
    for name, place in places.items():
        wanted = {part.name: part.shape for part in parts.get(name, [])} or {name: place.shape}
        shapes |= wanted
        if place.tensor.is_floating_point():
            floats |= wanted.keys()
    check_headers(
        folder,
        tensors,
        shapes,
        model_type=hf.config.model_type,
        is_ignorable=is_ignorable,
        is_float=floats.__contains__,
    )
    return {name: replace(place, parts=tuple(parts[name])) for name, place in places.items()}


def check_weight_files(hf: PreTrainedModel, folder: Path) -> None:
    """Raises ModelError where `match_files` does."""
    with open_tensors(folder) as tensors:
        match_files(hf, folder, tensors)


@torch.no_grad()
def load_weights(folder: Path, places: Mapping[str, Place]) -> None:
    """Fills every place from the folder, cast to its dtype; of a sharded parameter, this rank's rows."""
    with open_tensors(folder) as tensors:
        for place in places.values():
            local, start = local_rows(place.tensor)
            for part in place.parts:
                _copy_rows(part, tensors[part.name], local, start)


@torch.no_grad()
def blend_part(place: Place, part: FilePart, whole: Tensor, keep: float) -> None:
    """keep * what is there + (1 - keep) * `whole`, in float32, where `part` stands in this rank's rows of `place`.

    In place, so that the shard stays in the memory, and the kind of memory, that it is in. No collective.

    Args:
        whole: the file's tensor, on any device; not changed.
    """
    local, start = local_rows(place.tensor)
    if not local.ndim:
        index: tuple[slice, ...] = ()
        new = whole
    elif (share := _share(part, local, start)) is not None:
        index, rows = share
        new = whole[None] if part.stacked else whole[rows]
    else:
        return
    if not keep or not local.is_floating_point():
        local[index] = new.to(local.device, local.dtype)
        return
    blended = torch.lerp(new.to(local.device, torch.float32), local[index].float(), keep)
    local[index] = blended.to(local.dtype)


def _copy_rows(part: FilePart, file: Any, local: Tensor, start: int) -> None:
    """Fills the rows of `local`, which begins at row `start` of its parameter, that `part` has a share in."""
    if not local.ndim:
        local.copy_(file.get_tensor(part.name))
        return
    if (share := _share(part, local, start)) is None:
        return
    index, wanted = share
    rows = file.get_slice(part.name)
    rows = rows[:][None] if part.stacked else rows[wanted]
    local[index] = rows.to(local.device, local.dtype)


def _share(part: FilePart, local: Tensor, start: int) -> tuple[tuple[slice, ...], slice] | None:
    """Where in `local` a part's rows go, and which of its rows those are; None: it has none there."""
    first = max(start, part.start[0])
    last = min(start + len(local), part.start[0] + part.sizes[0])
    if first >= last:
        return None
    rest = (slice(a, a + n) for a, n in zip(part.start[1:], part.sizes[1:], strict=True))
    return (slice(first - start, last - start), *rest), slice(first - part.start[0], last - part.start[0])


def local_rows(tensor: Tensor) -> tuple[Tensor, int]:
    """This rank's rows of a tensor, and the number of the first of them."""
    return (tensor.to_local(), first_row(tensor)) if isinstance(tensor, DTensor) else (tensor, 0)


def first_row(tensor: DTensor) -> int:
    """Where this rank's rows begin: fully_shard cuts the first dimension into equal parts, the last ones shorter."""
    mesh, n_rows = tensor.device_mesh, tensor.shape[0]
    return min(mesh.get_local_rank() * -(-n_rows // mesh.size()), n_rows)


@torch.no_grad()
def full_tensor(tensor: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """All rows on every rank, on `device`; collective if it is sharded. Cast before it travels."""
    tensor = tensor.detach().to(device, dtype or tensor.dtype)
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
