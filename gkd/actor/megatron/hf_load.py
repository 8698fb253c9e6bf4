"""A HF safetensors folder -> the parameters of this rank, one tensor at a time.

Only this rank's experts, rows and columns are read, from the mapped file into the parameter. Every rank checks the
headers of *all* tensors first, so that a bad folder fails on all ranks alike instead of leaving some in a collective.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from gkd.actor.megatron.hf_config import HfDims
from gkd.actor.megatron.hf_mapping import expected_hf_tensors, held_entries
from gkd.actor.megatron.layout import ParallelLayout
from gkd.errors import ModelError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_SHOWN = 5  # tensor names in one error message
_DTYPES = ("F32", "BF16", "F16")  # safetensors' names; integers and float8 are quantised weights


@torch.no_grad()
def load_hf_weights(
    model_path: str | Path, params: Mapping[str, torch.nn.Parameter], dims: HfDims, layout: ParallelLayout
) -> None:
    """Fills `params` (Megatron names of this stage) in place from a HF folder, cast to their dtype.

    Raises:
        ModelError: files missing or corrupt; tensors missing, unexpected or of the wrong shape or dtype; names them.
    """
    folder = Path(model_path)
    entries = held_entries(dims, layout)
    if unfilled := set(params) ^ {entry.param for entry in entries}:
        raise ModelError(f"the mapping table and the Megatron model disagree on {_some(sorted(unfilled))}")
    with open_tensors(folder) as tensors:
        _check_headers(folder, tensors, dims)
        for entry in entries:
            sources = [tensors[name].get_slice(name) for name in entry.hf_names]
            tp, tp_rank = (layout.tp, layout.tp_rank) if entry.owner is None else (1, 0)
            entry.layout.fill(params[entry.param].data, sources, dims, tp, tp_rank)


def check_weight_files(folder: Path, dims: HfDims) -> None:
    """Are the files whole, and do they hold exactly the tensors of `dims`? Reads headers only.

    Raises:
        ModelError: as `load_hf_weights` would.
    """
    with open_tensors(folder) as tensors:
        _check_headers(folder, tensors, dims)


@contextmanager
def open_tensors(folder: Path) -> Iterator[dict[str, Any]]:
    """Memory-maps a folder's safetensors files: tensor name -> the open file that holds it.

    Raises:
        ModelError: no safetensors files, a file that the index names is absent, or one is corrupt.
    """
    with ExitStack() as stack:
        tensors: dict[str, Any] = {}
        for path in _weight_files(folder):
            try:
                handle = stack.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{path} is not a readable safetensors file ({error}). Copy it again.") from error
            tensors.update(dict.fromkeys(handle.keys(), handle))
        yield tensors


def _weight_files(folder: Path) -> list[Path]:
    index = folder / INDEX_NAME
    if not index.is_file():
        if not (folder / SINGLE_NAME).is_file():
            raise ModelError(f"{folder} has neither {SINGLE_NAME} nor {INDEX_NAME}; convert the model to safetensors.")
        return [folder / SINGLE_NAME]
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index} is not a safetensors index ({error!r}). Copy it again.") from error
    if absent := [name for name in names if not (folder / name).is_file()]:
        raise ModelError(f"{index} names files that are not in the folder: {_some(absent)}. The copy is incomplete.")
    return [folder / name for name in names]


def _check_headers(folder: Path, tensors: Mapping[str, Any], dims: HfDims) -> None:
    """Raises ModelError on the first kind of disagreement between the files and the architecture."""
    expected = expected_hf_tensors(dims)
    if missing := [name for name in expected if name not in tensors]:
        raise ModelError(f"{folder}: {len(missing)} tensors are missing: {_some(missing)}.")
    if unexpected := [name for name in sorted(tensors) if name not in expected and not _is_ignorable(name, dims)]:
        raise ModelError(
            f"{folder}: {len(unexpected)} tensors do not belong to a {dims.model_type} model: {_some(unexpected)}."
        )
    for name, shape in expected.items():
        header = tensors[name].get_slice(name)
        if (actual := tuple(header.get_shape())) != shape:
            raise ModelError(f"{folder}: {name} has shape {list(actual)}, config.json wants {list(shape)}.")
        if (dtype := header.get_dtype()) not in _DTYPES:
            raise ModelError(
                f"{folder}: {name} has dtype {dtype}, supported are {', '.join(_DTYPES)}. Convert quantised weights."
            )


def _is_ignorable(name: str, dims: HfDims) -> bool:
    """What old or careless exporters add and transformers ignores too."""
    return name.endswith("rotary_emb.inv_freq") or (dims.tied_embeddings and name == "lm_head.weight")


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
