"""Read the sizes and features of a Megatron model from a HF folder's config.json."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from gkd.errors import ModelError
from gkd.hf.model_dims import ModelDims, check_megatron_support, read_dims


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronDims(ModelDims):
    """Sizes of a supported model, and the constants of its norms and rotary embeddings."""

    norm_eps: float
    rope_inv_freq: tuple[float, ...]  # [head_dim / 2] float32 values, rope scaling applied


def read_megatron_dims(model_path: str | Path) -> MegatronDims:
    """Read config.json of a local HF folder through transformers, which fills in what the file leaves out.

    Raises:
        ModelError: the folder or its config is missing or unreadable, or it has an unsupported architecture or feature.
    """
    folder = Path(model_path)
    if not (folder / "config.json").is_file():
        raise ModelError(
            f"{folder} is not a HF model folder: it has no config.json. Fix: set model.path to a local one."
        )
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"{folder}/config.json cannot be read: {error}") from error
    config_json = config.to_dict()
    check_megatron_support(config_json, str(folder))
    dims = read_dims(config_json)
    return MegatronDims(
        **{field.name: getattr(dims, field.name) for field in fields(dims)},
        norm_eps=config.rms_norm_eps,
        rope_inv_freq=_rope_inv_freq(folder, config, dims.head_dim),
    )


def _rope_inv_freq(folder: Path, config: PretrainedConfig, head_dim: int) -> tuple[float, ...]:
    """Return the [head_dim / 2] rotations per position, radians. transformers computes the scaled kinds.

    Megatron's own llama3 scaling hard-codes three of the four numbers that a config may set.
    """
    # transformers 5 stores theta and scaling in rope_parameters, for old and new config files.
    rope: dict[str, Any] = dict(config.rope_parameters)
    kind = rope.get("rope_type", "default")
    if kind == "default":
        exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
        inv_freq = 1.0 / (float(rope["rope_theta"]) ** exponents)
    else:
        inv_freq, attention_scaling = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
        if not math.isclose(attention_scaling, 1.0):
            raise ModelError(f"{folder}: rope_type {kind!r} scales attention by {attention_scaling}; not supported.")
    return tuple(inv_freq.tolist())
