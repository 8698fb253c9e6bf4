"""Load the parameters of this rank from a HF safetensors folder, one tensor at a time.

Only this rank's experts, rows and columns are read, from the mapped file into the parameter. Every rank first checks
the headers of *all* tensors, so that a bad folder fails on all ranks and none hangs in a collective.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from gkd.actor.megatron.hf_mapping import expected_hf_tensors, held_entries
from gkd.actor.megatron.layout import ParallelLayout
from gkd.errors import ModelError
from gkd.hf.files import check_headers, open_tensors, some_names
from gkd.hf.model_dims import ModelDims


@torch.no_grad()
def load_hf_weights(
    model_path: str | Path, params: Mapping[str, torch.nn.Parameter], dims: ModelDims, layout: ParallelLayout
) -> None:
    """Fill `params` (Megatron names of this stage) in place from a HF folder, cast to their dtype.

    Raises:
        ModelError: files are missing or corrupt, or tensors are missing, unexpected or of the wrong shape or dtype.
    """
    folder = Path(model_path)
    entries = held_entries(dims, layout)
    if unfilled := set(params) ^ {entry.param for entry in entries}:
        raise ModelError(f"the mapping table and the Megatron model disagree on {some_names(sorted(unfilled))}")
    with open_tensors(folder) as tensors:
        _check_headers(folder, tensors, dims)
        for entry in entries:
            sources = [tensors[name].get_slice(name) for name in entry.hf_names]
            tp, tp_rank = (layout.tp, layout.tp_rank) if entry.owner is None else (1, 0)
            entry.layout.fill(params[entry.param].data, sources, dims, tp, tp_rank)


def check_weight_files(folder: Path, dims: ModelDims) -> None:
    """Check that the files are complete and hold exactly the tensors of `dims`. Reads headers only.

    Raises:
        ModelError: see `load_hf_weights`.
    """
    with open_tensors(folder) as tensors:
        _check_headers(folder, tensors, dims)


def _check_headers(folder: Path, tensors: Mapping[str, Any], dims: ModelDims) -> None:
    """Raise ModelError if the tensors of the files do not match the architecture."""
    check_headers(
        folder,
        tensors,
        expected_hf_tensors(dims),
        model_type=dims.model_type,
        is_ignorable=lambda name: _is_ignorable(name, dims),
    )


def _is_ignorable(name: str, dims: ModelDims) -> bool:
    """Return whether the tensor is a known redundant one, which transformers ignores, too."""
    return name.endswith("rotary_emb.inv_freq") or (dims.tied_embeddings and name == "lm_head.weight")
