"""One record for each family of models whose sizes are known exactly: how it differs from Llama.

`gkd.hf.model_dims` reads config.json with it. The Megatron student's tensors (`gkd.actor.megatron.hf_mapping`) and
layers (`gkd.actor.megatron.layer_spec`) follow from the features that it finds, not from the family's name. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

# Frequencies that depend on nothing but the config; "dynamic" and others change with the sequence.
ROPE_TYPES = ("default", "linear", "llama3")


@dataclass(frozen=True, slots=True)
class Family:
    """The models of one `model_type`, as transformers computes them.

    Sizes are the values of keys that config.json may leave out. A feature that each model chooses is named by its key.
    """

    n_kv_heads: int | None = None  # None: as many as there are heads
    ffn_size: int | None = None
    max_positions: int | None = None
    other_defaults: Mapping[str, int] = field(default_factory=dict)  # key -> value
    qk_norm: bool | str = False  # RMSNorm on the queries and keys of each head
    qkv_bias: bool | str = False  # bias on the q/k/v projections
    post_norm: bool = False  # OLMo 2: norms after attention and MLP, and of all queries, or keys, of a token together
    has_no_rope_layers: bool = False  # no_rope_layers: some layers do not rotate queries and keys
    # Gemma 3: embeddings times sqrt(H); norms before and after attention and MLP, which multiply by 1 + weight; GELU;
    # query_pre_attn_scalar; layer_types: some layers have a window, and a rotary embedding of their own.
    is_gemma: bool = False
    default_window: int | None = None  # sliding_window, if config.json has none; None: the key has no effect
    scales_queries: bool = False  # Ministral 3: by llama_4_scaling_beta, beyond the original context; and yarn
    normalizes_experts: bool = False  # whatever norm_topk_prob is
    sigmoid_router: bool = False  # GLM-4.5's router and shared experts; the first layers are dense
    is_partly_rotated: bool = False  # partial_rotary_factor: only the first columns of a head are rotated
    # In the files: an MLP with experts, and an expert's matrices.
    expert_names: tuple[str, str, str, str] = ("mlp", "gate_proj", "up_proj", "down_proj")

    @property
    def defaults(self) -> dict[str, int]:
        """The values that config.json may leave out, by key."""
        keys = "num_key_value_heads", "intermediate_size", "max_position_embeddings"
        sizes = zip(keys, (self.n_kv_heads, self.ffn_size, self.max_positions), strict=True)
        return {**{key: size for key, size in sizes if size is not None}, **self.other_defaults}


_QWEN3_MOE = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
_QWEN2_MOE = {"num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408, "qkv_bias": True}
_QWEN2_MOE |= {"shared_expert_intermediate_size": 5632}
_GLM4_MOE = {"n_routed_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 1408, "norm_topk_prob": True}
_GLM4_MOE |= {"n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
_MIXTRAL = ("block_sparse_moe", "w1", "w3", "w2")

FAMILIES: dict[str, Family] = {
    "qwen3": Family(32, 22016, 32768, {"head_dim": 128}, qk_norm=True),
    "qwen2": Family(32, 22016, 32768, qkv_bias=True),
    "llama": Family(None, 11008, 2048),
    "mistral": Family(8, 14336, 131072, default_window=4096),
    "qwen3_moe": Family(4, 6144, 32768, _QWEN3_MOE, qk_norm=True),
    "qwen2_moe": Family(16, 5632, 32768, _QWEN2_MOE, qkv_bias="qkv_bias"),
    "smollm3": Family(4, 11008, 32768, {"tie_word_embeddings": True}, has_no_rope_layers=True),
    "glm4_moe": Family(
        8,
        10944,
        131072,
        _GLM4_MOE,
        qk_norm="use_qk_norm",
        qkv_bias="attention_bias",
        sigmoid_router=True,
        is_partly_rotated=True,
    ),
    "seed_oss": Family(8, 27648, 524288, {"head_dim": 128, "attention_bias": True}, qkv_bias="attention_bias"),
    "olmo2": Family(None, 11008, 2048, post_norm=True),
    "ministral3": Family(8, 14336, 262144, {"head_dim": 128}, default_window=0, scales_queries=True),
    "mixtral": Family(
        8, 14336, 131072, {"num_local_experts": 8}, default_window=0, normalizes_experts=True, expert_names=_MIXTRAL
    ),
    "gemma3_text": Family(
        4,
        9216,
        131072,
        {"head_dim": 256, "tie_word_embeddings": True},
        qk_norm=True,
        default_window=4096,
        is_gemma=True,
    ),
}
OTHER = Family()  # stands for every other model_type
