"""Load a HF folder's tensors into this rank's shards, and gather full tensors for export.

One parameter at a time in both directions. A rank reads only its own rows from the files.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from gkd.errors import ModelError
from gkd.hf.model_folder import check_headers, open_tensors
from teacher_server.engines.hf import outside_names


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
        sources = file_parts(hf, tensors, {name: place.shape for name, place in places.items()} | aliases)
    except ModelError as error:
        raise ModelError(f"{folder}: {error}") from error
    unread = {part.name for name in aliases for part in sources.get(name, [])} | outside_names(hf, tensors)
    ignored = tuple(hf._keys_to_ignore_on_load_unexpected or ())

    def is_ignorable(name: str) -> bool:
        by_model = any(re.search(pattern, name) for pattern in ignored)
        return name in unread or name.endswith("rotary_emb.inv_freq") or by_model

    shapes: dict[str, tuple[int, ...]] = {}
    floats: set[str] = set()
    for name, place in places.items():
        expected = {part.name: part.shape for part in sources.get(name, [])} or {name: place.shape}
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
    return {name: replace(place, parts=tuple(sources[name])) for name, place in places.items()}


def check_weight_files(hf: PreTrainedModel, folder: Path) -> None:
    """Raise ModelError like `match_files`."""
    with open_tensors(folder) as tensors:
        match_files(hf, folder, tensors)


def load_weights(folder: Path, places: Mapping[str, Place]) -> None:
    """Fill every place from the folder, cast to its dtype; only this rank's rows of a sharded parameter."""
    with open_tensors(folder) as tensors:
        for place in places.values():
            for part in place.parts:
                file = tensors[part.name]
                blend_part(place, part, file.get_slice(part.name) if part.shape else file.get_tensor(part.name))


@torch.no_grad()
def blend_part(place: Place, part: FilePart, whole: Any, keep: float = 0.0) -> None:
    """Blend this rank's rows of a part: keep * current values + (1 - keep) * `whole`, in float32. Not a collective.

    In place, so that the shard keeps its memory (and remains pinned).

    Args:
        whole: the file's tensor, on any device, or its slice on disk, of which only these rows are read.
    """
    local, start = local_rows(place.tensor)
    index: tuple[slice, ...] = ()
    new = whole
    if local.ndim:
        first = max(start, part.start[0])
        last = min(start + len(local), part.start[0] + part.sizes[0])
        if first >= last:
            return
        rest = (slice(a, a + n) for a, n in zip(part.start[1:], part.sizes[1:], strict=True))
        index = (slice(first - start, last - start), *rest)
        new = whole[:][None] if part.stacked else whole[first - part.start[0] : last - part.start[0]]
    if not keep or not local.is_floating_point():
        local[index] = new.to(local.device, local.dtype)
        return
    blended = torch.lerp(new.to(local.device, torch.float32), local[index].float(), keep)
    local[index] = blended.to(local.dtype)


def local_rows(tensor: Tensor) -> tuple[Tensor, int]:
    """Return this rank's rows of a tensor and the index of the first one."""
    return (tensor.to_local(), first_row(tensor)) if isinstance(tensor, DTensor) else (tensor, 0)


def flat_rows(tensor: Tensor) -> tuple[int, Tensor]:
    """Return this rank's rows as live elements, [n], and before them the index of the first in the whole tensor."""
    local, row = local_rows(tensor.detach())
    return row * prod(tensor.shape[1:]), local.view(-1)


def first_row(tensor: DTensor) -> int:
    """Return the index of this rank's first row: fully_shard makes equal parts, of which the last ones are shorter."""
    mesh = tensor.device_mesh
    n_rows = tensor.shape[0]
    return min(mesh.get_local_rank() * -(-n_rows // mesh.size()), n_rows)


@torch.no_grad()
def full_tensor(tensor: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Return all rows on every rank, on `device`; collective if it is sharded. The cast precedes the transfer."""
    tensor = tensor.detach().to(device, dtype or tensor.dtype)
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@dataclass(frozen=True, slots=True)
class FilePart:
    """The rectangle of a parameter that one tensor of the files fills."""

    name: str  # tensor's name in the files
    start: tuple[int, ...]  # first element, per dimension of the parameter
    sizes: tuple[int, ...]  # per dimension of the parameter
    stacked: bool = False  # the file's tensor is one row of the parameter and lacks its first dimension

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the file's tensor."""
        return self.sizes[1:] if self.stacked else self.sizes

    def cut_from(self, whole: Tensor) -> Tensor:
        """Return the file's tensor from the whole parameter; a view if possible."""
        part = whole[tuple(slice(a, a + n) for a, n in zip(self.start, self.sizes, strict=True))]
        return (part[0] if self.stacked else part).contiguous()


def file_parts(
    hf: PreTrainedModel, names: Iterable[str], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, list[FilePart]]:
    """Return the files' tensors by the parameter that they belong to. Tensors of no parameter are left out.

    Each tensor of a HF folder is a rectangle of a model parameter, where names or shapes differ.

    On load, transformers renames tensors and stacks the experts of a layer into one parameter. This module reads
    its conversion tables. With the rectangles, a rank reads only the rows of its shard, and an export splits the
    parameter again under the names of the files, which other programs expect.

        files (mixture of experts, E experts)         parameter
        experts.3.gate_proj.weight   [I, H]           experts.gate_up_proj [E, 2 I, H], at [3, 0:I]
        experts.3.up_proj.weight     [I, H]           the same, at [3, I:2I]
        block_sparse_moe.gate.weight [E, H]           mlp.gate.weight [E, H], all of it

    Args:
        names: of the files' tensors.
        shapes: of the model's parameters and buffers, by name.

    Raises:
        ModelError: transformers applies a conversion that is not supported here, or parts of a parameter are missing.
    """
    transforms = get_model_conversion_mapping(hf)
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    sources: dict[str, list[FilePart]] = {}
    groups: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    # Order names as transformers stacks their tensors: by the numbers in them.
    for name in sorted(names, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, hf.base_model_prefix, dict(shapes))
        if target not in shapes and name in shapes:
            target = name
            pattern = None
        if target not in shapes:
            continue
        if pattern is not None:
            groups[target][pattern].append(name)
        else:
            sources.setdefault(target, []).append(FilePart(name, (0,) * len(shapes[target]), shapes[target]))
    for target, matched in groups.items():
        converter = by_pattern[next(iter(matched))]
        sources[target] = [*sources.get(target, []), *_fused_parts(hf, converter, target, shapes[target], matched)]
    for target, matches in sources.items():
        if target not in groups and len(matches) > 1:
            raise ModelError(f"{' and '.join(part.name for part in matches)} map to the same tensor, {target}.")
    return sources


def _fused_parts(
    hf: PreTrainedModel,
    converter: WeightConverter,
    target: str,
    shape: tuple[int, ...],
    matched: Mapping[str, list[str]],
) -> list[FilePart]:
    """Return the parts of a parameter that concatenates one or more stacks of tensors."""
    match converter.operations:
        case [MergeModulelist(dim=0)]:
            dim = None
        case [MergeModulelist(dim=0), Concatenate(num_shards_attribute=None) as concatenate] if concatenate.dim > 0:
            dim = concatenate.dim
        case operations:
            what = " and ".join(type(operation).__name__ for operation in operations)
            raise ModelError(
                f"transformers converts tensors of a {hf.config.model_type} model in a way that the student does not: "
                f"{what} for {target}.",
                "use another model.",
            )
    patterns = converter.source_patterns
    width = shape[dim] // len(patterns) if dim is not None else 0
    sources = []
    for i, pattern in enumerate(patterns):
        if len(names := matched.get(pattern, [])) != shape[0]:
            raise ModelError(f"{target} needs {shape[0]} tensors named {pattern}; the files have {len(names)}.")
        for row, name in enumerate(names):
            start = [row, *(0 for _ in shape[1:])]
            sizes = [1, *shape[1:]]
            if dim is not None:
                start[dim] = i * width
                sizes[dim] = width
            sources.append(FilePart(name, tuple(start), tuple(sizes), stacked=True))
    return sources
