"""One record for each family of models whose sizes are known exactly: how it differs from Llama.

`gkd.hf.model_dims` reads config.json with it. The Megatron student's tensors (`gkd.actor.megatron.hf_mapping`) and
layers (`gkd.actor.megatron.layer_spec`) follow from the features that it finds, not from the family's name. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

# Frequencies that depend on nothing but the config; "dynamic" and others change with the sequence.
ROPE_TYPES = ("default", "linear", "llama3")


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """The models of one `model_type`, as transformers computes them.

    A feature that each model chooses is named by its key in config.json.
    """

    defaults: Mapping[str, int] = field(default_factory=dict)  # values that config.json may leave out
    in_megatron: bool = True  # the Megatron student computes it
    qk_norm: bool | str = False  # RMSNorm on the queries and keys of each head
    qkv_bias: bool | str = False  # bias on the q/k/v projections
    default_window: int | None = None  # sliding_window, if config.json has none; None: the key has no effect
    normalizes_experts: bool = False  # whatever norm_topk_prob is


FAMILIES: dict[str, Family] = {
    "qwen3": Family(
        defaults={
            "num_key_value_heads": 32,
            "head_dim": 128,
            "intermediate_size": 22016,
            "max_position_embeddings": 32768,
        },
        qk_norm=True,
    ),
    "qwen2": Family(
        defaults={"num_key_value_heads": 32, "intermediate_size": 22016, "max_position_embeddings": 32768},
        qkv_bias=True,
    ),
    "llama": Family(defaults={"intermediate_size": 11008, "max_position_embeddings": 2048}),
    "mistral": Family(
        defaults={"num_key_value_heads": 8, "intermediate_size": 14336, "max_position_embeddings": 131072},
        default_window=4096,
    ),
    "qwen3_moe": Family(
        defaults={
            "intermediate_size": 6144,
            "num_key_value_heads": 4,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "max_position_embeddings": 32768,
        },
        qk_norm=True,
    ),
    "mixtral": Family(
        defaults={
            "num_key_value_heads": 8,
            "num_local_experts": 8,
            "intermediate_size": 14336,
            "max_position_embeddings": 131072,
        },
        in_megatron=False,
        normalizes_experts=True,
    ),
}
OTHER = Family()  # stands for every other model_type
