"""A HF folder's tensors -> this rank's shards, and back: full tensors under the names of the files.

One parameter at a time in both directions. A rank reads only its own rows from the files.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from gkd.actor.hf_files import check_headers, open_tensors
from gkd.errors import ModelError

_FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor of the files lives: fully_shard replaces parameters, but not the modules that hold them."""

    module: nn.Module
    attribute: str
    shape: tuple[int, ...]  # of the whole tensor

    @property
    def tensor(self) -> Tensor:
        tensor: Tensor = getattr(self.module, self.attribute)
        return tensor


def named_places(hf: PreTrainedModel) -> tuple[dict[str, Place], frozenset[str]]:
    """The model's parameters and persistent buffers by name, and the second names of those that are shared."""
    places: dict[str, Place] = {}
    aliases: set[str] = set()
    seen: set[int] = set()
    for path, module in hf.named_modules():
        kept = {k: b for k, b in module._buffers.items() if k not in module._non_persistent_buffers_set}
        for attribute, tensor in {**module._parameters, **kept}.items():
            if tensor is None:
                continue
            name = f"{path}.{attribute}"
            if id(tensor) in seen:
                aliases.add(name)
            else:
                seen.add(id(tensor))
                places[name] = Place(module, attribute, tuple(tensor.shape))
    return places, frozenset(aliases)


def match_files(hf: PreTrainedModel, folder: Path, tensors: Mapping[str, Any]) -> dict[str, Place]:
    """Place of each tensor of the folder, by its name there; reads headers only.

    Args:
        hf: as `build_on_meta` made it, not yet sharded.
        tensors: as `open_tensors` gives them.

    Raises:
        ModelError: tensors are missing, unexpected, of the wrong shape or not of a float type; names them.
    """
    places, aliases = named_places(hf)
    prefix = f"{hf.base_model_prefix}."
    if not any(name.startswith(prefix) for name in tensors):  # saved from the backbone alone, as the first gpt2 was
        places = {name.removeprefix(prefix): place for name, place in places.items()}
        aliases = frozenset(name.removeprefix(prefix) for name in aliases)
    ignored = tuple(hf._keys_to_ignore_on_load_unexpected or ())

    def is_ignorable(name: str) -> bool:
        by_model = any(re.search(pattern, name) for pattern in ignored)
        return name in aliases or name.endswith("rotary_emb.inv_freq") or by_model

    shapes = {name: place.shape for name, place in places.items()}
    check_headers(folder, tensors, shapes, model_type=hf.config.model_type, is_ignorable=is_ignorable)
    floats = [name for name, place in places.items() if place.tensor.is_floating_point()]
    for name in floats:
        if (dtype := tensors[name].get_slice(name).get_dtype()) not in _FLOAT_DTYPES:
            raise ModelError(f"{folder}: {name} is stored as {dtype}; wanted is one of {', '.join(_FLOAT_DTYPES)}.")
    return places


def check_weight_files(hf: PreTrainedModel, folder: Path) -> None:
    """Raises ModelError where `match_files` does."""
    with open_tensors(folder) as tensors:
        match_files(hf, folder, tensors)


@torch.no_grad()
def load_weights(folder: Path, places: Mapping[str, Place]) -> None:
    """Fills every place from the folder, cast to its dtype; of a sharded parameter, this rank's rows."""
    with open_tensors(folder) as tensors:
        for name, place in places.items():
            tensor = place.tensor
            if isinstance(tensor, DTensor):
                local, start = tensor.to_local(), first_row(tensor)
                if len(local):
                    local.copy_(tensors[name].get_slice(name)[start : start + len(local)])
            else:
                tensor.copy_(tensors[name].get_tensor(name))


def first_row(tensor: DTensor) -> int:
    """Where this rank's rows begin: fully_shard cuts the first dimension into equal parts, the last ones shorter."""
    mesh, n_rows = tensor.device_mesh, tensor.shape[0]
    return min(mesh.get_local_rank() * -(-n_rows // mesh.size()), n_rows)


@torch.no_grad()
def full_tensor(tensor: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """All rows on every rank, on `device`; collective if it is sharded. Cast before it travels."""
    tensor = tensor.detach().to(device, dtype or tensor.dtype)
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
