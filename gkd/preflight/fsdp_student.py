"""What the driver can know of an fsdp2 student before any process starts: its code and its files' headers."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PretrainedConfig

from gkd.actor.fsdp.lora import check_targets
from gkd.actor.fsdp.model import build_on_meta, layer_list
from gkd.actor.fsdp.probe import probe_on_meta
from gkd.actor.fsdp.weights import check_weight_files
from gkd.config.schema import Config


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """The sizes of a causal language model that other settings must fit; more than one where layers differ.

    Empty where config.json does not say, or says it under a name of its own.
    """

    vocab_size: int
    n_heads: tuple[int, ...]
    n_kv_heads: tuple[int, ...]
    ffn_sizes: tuple[int, ...]
    expert_ffn_sizes: tuple[int, ...]
    max_positions: int  # sys.maxsize where there is no limit


def check_fsdp_student(config: Config) -> ModelSizes:
    """Builds the model without weights and compares it with the headers of its files.

    Raises:
        ModelError, ConfigError: as `FsdpStudent` would, but for what only a forward pass with weights shows.
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
    return ModelSizes(
        vocab_size=text.vocab_size,
        n_heads=_counts(text, "num_attention_heads"),
        n_kv_heads=_counts(text, "num_key_value_heads"),
        ffn_sizes=_counts(text, "intermediate_size"),
        expert_ffn_sizes=_counts(text, "moe_intermediate_size"),
        max_positions=max(_counts(text, "max_position_embeddings"), default=sys.maxsize),
    )


def _counts(config: PretrainedConfig, name: str) -> tuple[int, ...]:
    """What a config says under a name: one number, or one for each layer; each once."""
    value = getattr(config, name, None)
    values = value if isinstance(value, list | tuple) else [value]
    return tuple(sorted({int(each) for each in values if each}))
