"""What the driver can know of an fsdp2 student before any process starts: its code and its files' headers."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from gkd.actor.fsdp.lora import check_targets
from gkd.actor.fsdp.model import build_on_meta, check_recompute
from gkd.actor.fsdp.weights import check_weight_files
from gkd.config import Config


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """The sizes of a causal language model that other settings must fit."""

    vocab_size: int
    n_heads: int
    n_kv_heads: int
    ffn_size: int  # 0 where config.json does not say
    max_positions: int  # sys.maxsize where there is no limit


def check_fsdp_student(config: Config) -> ModelSizes:
    """Builds the model without weights and compares it with the headers of its files.

    Raises:
        ModelError, ConfigError: as `FsdpStudent` would, but for what only a forward pass shows.
    """
    actor, folder = config.actor, Path(config.model.path)
    hf = build_on_meta(
        folder,
        dtype=torch.float32,
        packing=actor.packing,
        trust_remote_code=config.model.trust_remote_code,
    )
    check_recompute(hf, actor.recompute)
    check_weight_files(hf, folder)
    if actor.lora.rank > 0:
        check_targets(hf, actor.lora)
    text = hf.config.get_text_config()
    n_heads = text.num_attention_heads
    return ModelSizes(
        vocab_size=text.vocab_size,
        n_heads=n_heads,
        n_kv_heads=getattr(text, "num_key_value_heads", None) or n_heads,
        ffn_size=getattr(text, "intermediate_size", None) or 0,
        max_positions=getattr(text, "max_position_embeddings", None) or sys.maxsize,
    )
