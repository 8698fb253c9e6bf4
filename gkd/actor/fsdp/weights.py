"""Load a HF folder's tensors into this rank's shards, and gather full tensors for export.

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
    """The module attribute that holds a tensor: fully_shard replaces parameters, but not their modules."""

    module: nn.Module
    attribute: str
    shape: tuple[int, ...]  # shape of the whole tensor
    parts: tuple[FilePart, ...] = ()  # the files' tensors in it; empty for an adapter

    @property
    def tensor(self) -> Tensor:
        tensor: Tensor = getattr(self.module, self.attribute)
        return tensor


def named_places(hf: PreTrainedModel) -> tuple[dict[str, Place], dict[str, tuple[int, ...]]]:
    """Return the model's parameters and persistent buffers by name, and the shapes of further names of shared ones."""
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
    """Return the place of each tensor of the model by name, with the folder's tensors in it. Reads headers only.

    Args:
        hf: result of `build_on_meta`, not yet sharded.
        tensors: result of `open_tensors`.

    Raises:
        ModelError: tensors are missing, unexpected, of the wrong shape or quantized (the error names them), or need a
            conversion on load that is not supported.
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
        expected = {part.name: part.shape for part in parts.get(name, [])} or {name: place.shape}
        shapes |= expected
        if place.tensor.is_floating_point():
            floats |= expected.keys()
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
    """Raise ModelError like `match_files`."""
    with open_tensors(folder) as tensors:
        match_files(hf, folder, tensors)


@torch.no_grad()
def load_weights(folder: Path, places: Mapping[str, Place]) -> None:
    """Fill every place from the folder, cast to its dtype; only this rank's rows of a sharded parameter."""
    with open_tensors(folder) as tensors:
        for place in places.values():
            local, start = local_rows(place.tensor)
            for part in place.parts:
                _copy_rows(part, tensors[part.name], local, start)


@torch.no_grad()
def blend_part(place: Place, part: FilePart, whole: Tensor, keep: float) -> None:
    """Blend this rank's rows of a part: keep * current values + (1 - keep) * `whole`, in float32. Not a collective.

    In place, so that the shard keeps its memory (and remains pinned).

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
    """Fill the rows of `local` that belong to `part`; `local` begins at row `start` of its parameter."""
    if not local.ndim:
        local.copy_(file.get_tensor(part.name))
        return
    if (share := _share(part, local, start)) is None:
        return
    index, source_rows = share
    rows = file.get_slice(part.name)
    rows = rows[:][None] if part.stacked else rows[source_rows]
    local[index] = rows.to(local.device, local.dtype)


def _share(part: FilePart, local: Tensor, start: int) -> tuple[tuple[slice, ...], slice] | None:
    """Return the index of a part's rows in `local`, and which of its rows they are; None if there is no overlap."""
    first = max(start, part.start[0])
    last = min(start + len(local), part.start[0] + part.sizes[0])
    if first >= last:
        return None
    rest = (slice(a, a + n) for a, n in zip(part.start[1:], part.sizes[1:], strict=True))
    return (slice(first - start, last - start), *rest), slice(first - part.start[0], last - part.start[0])


def local_rows(tensor: Tensor) -> tuple[Tensor, int]:
    """Return this rank's rows of a tensor and the index of the first one."""
    return (tensor.to_local(), first_row(tensor)) if isinstance(tensor, DTensor) else (tensor, 0)


def first_row(tensor: DTensor) -> int:
    """Return the index of this rank's first row: fully_shard makes equal parts, of which the last ones are shorter."""
    mesh, n_rows = tensor.device_mesh, tensor.shape[0]
    return min(mesh.get_local_rank() * -(-n_rows // mesh.size()), n_rows)


@torch.no_grad()
def full_tensor(tensor: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Return all rows on every rank, on `device`; collective if it is sharded. The cast precedes the transfer."""
    tensor = tensor.detach().to(device, dtype or tensor.dtype)
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
