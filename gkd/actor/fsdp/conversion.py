"""Map each tensor of a HF folder to a rectangle of a model parameter, where names or shapes differ.

On load, transformers renames tensors and stacks the experts of a layer into one parameter. This module reads its
conversion tables. With the rectangles, a rank reads only the rows of its shard, and an export splits the parameter
again under the names of the files, which other programs expect.

    files (mixture of experts, E experts)         parameter
    experts.3.gate_proj.weight   [I, H]           experts.gate_up_proj [E, 2 I, H], at [3, 0:I]
    experts.3.up_proj.weight     [I, H]           the same, at [3, I:2I]
    block_sparse_moe.gate.weight [E, H]           mlp.gate.weight [E, H], all of it
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor
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
    parts: dict[str, list[FilePart]] = {}
    groups: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    # Order names as transformers stacks their tensors: by the numbers in them.
    for name in sorted(names, key=dot_natural_key):
        own, pattern = rename_source_key(name, renamings, converters, hf.base_model_prefix, dict(shapes))
        if own not in shapes and name in shapes:
            own, pattern = name, None
        if own not in shapes:
            continue
        if pattern is not None:
            groups[own][pattern].append(name)
        else:
            parts.setdefault(own, []).append(FilePart(name, (0,) * len(shapes[own]), shapes[own]))
    for own, found in groups.items():
        converter = by_pattern[next(iter(found))]
        parts[own] = [*parts.get(own, []), *_fused_parts(hf, converter, own, shapes[own], found)]
    for own, matches in parts.items():
        if own not in groups and len(matches) > 1:
            raise ModelError(f"{' and '.join(part.name for part in matches)} map to the same tensor, {own}.")
    return parts


def _fused_parts(
    hf: PreTrainedModel,
    converter: WeightConverter,
    own: str,
    shape: tuple[int, ...],
    found: Mapping[str, list[str]],
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
                f"actor.strategy=fsdp2 does not support the conversion on load of a {hf.config.model_type} model: "
                f"{what} for {own}. Fix: use actor.strategy=megatron if it supports this architecture."
            )
    patterns = converter.source_patterns
    width = shape[dim] // len(patterns) if dim is not None else 0
    parts = []
    for i, pattern in enumerate(patterns):
        if len(names := found.get(pattern, [])) != shape[0]:
            raise ModelError(f"{own} needs {shape[0]} tensors named {pattern}; the files have {len(names)}.")
        for row, name in enumerate(names):
            start, sizes = [row, *(0 for _ in shape[1:])], [1, *shape[1:]]
            if dim is not None:
                start[dim], sizes[dim] = i * width, width
            parts.append(FilePart(name, tuple(start), tuple(sizes), stacked=True))
    return parts
