"""Check an fsdp2 student before any process starts: its code, and the headers of its weight files."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import PretrainedConfig

from gkd.actor.fsdp.lora import check_targets
from gkd.actor.fsdp.model import build_on_meta, layer_list
from gkd.actor.fsdp.probe import probe_on_meta
from gkd.actor.fsdp.weights import check_weight_files
from gkd.config.schema import Config
from gkd.hf.model_dims import check_engine_split


def check_fsdp_student(config: Config) -> tuple[int, int]:
    """Build the model without weights and compare it with the headers of its files.

    Sizes come from transformers, not from `gkd.hf.model_dims`: the model may have code of its own, layers of different
    sizes, and names of its own for them. A size that it does not name is not checked.

    Returns:
        (vocabulary size, longest sequence in tokens; sys.maxsize if there is no limit)

    Raises:
        ModelError, ConfigError: as `FsdpStudent` would, except for errors that need a forward pass with weights; or
            rollout.tp cannot split the model.
    """
    actor, folder = config.actor, Path(config.model.path)
    hf = build_on_meta(
        folder,
        dtype=torch.float32,
        packing=actor.packing,
        trust_remote_code=config.model.trust_remote_code,
    )
    check_weight_files(hf, folder)
    if actor.lora.rank > 0:
        check_targets(hf, actor.lora)
    n_layers = len(layer_list(hf))
    probe_on_meta(hf, n_layers=n_layers, packing=actor.packing, fused=actor.fused_lm_head)
    text = hf.config.get_text_config()
    heads, kv_heads = distinct_sizes(text, "num_attention_heads"), distinct_sizes(text, "num_key_value_heads")
    columns = {
        "MLP columns": distinct_sizes(text, "intermediate_size"),
        "expert columns": distinct_sizes(text, "moe_intermediate_size"),
    }
    check_engine_split(config.rollout.tp, heads, kv_heads, columns)
    return text.vocab_size, max(distinct_sizes(text, "max_position_embeddings"), default=sys.maxsize)


def distinct_sizes(config: PretrainedConfig, name: str) -> tuple[int, ...]:
    """Return the distinct values of a setting that is one number, or one for each layer; empty if it is not set."""
    value = getattr(config, name, None)
    values = value if isinstance(value, list | tuple) else [value]
    return tuple(sorted({int(each) for each in values if each}))
