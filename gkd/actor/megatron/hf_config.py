"""A HF model folder's config.json as the sizes and features that the Megatron model is built from."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from gkd.errors import ModelError

# transformers' model_type -> (RMSNorm on queries and keys, bias on the q/k/v projections)
SUPPORTED_ARCHITECTURES: dict[str, tuple[bool, bool]] = {
    "qwen3": (True, False),
    "qwen2": (False, True),
    "llama": (False, False),
    "mistral": (False, False),
    "qwen3_moe": (True, False),
}
# Frequencies that depend on nothing but the config; "dynamic" and friends change with the sequence.
_SUPPORTED_ROPE = ("default", "linear", "llama3")


@dataclass(frozen=True, slots=True)
class HfDims:
    """What a decoder-only model of the supported family is made of."""

    model_type: str
    vocab_size: int  # unpadded
    hidden_size: int
    ffn_size: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    norm_eps: float
    max_positions: int
    tied_embeddings: bool
    qk_norm: bool
    qkv_bias: bool
    rope_inv_freq: tuple[float, ...]  # [head_dim / 2] float32 values, rope scaling applied
    sliding_window: int | None = None  # tokens a token sees, itself included; None: all before it
    moe: MoeDims | None = None  # None: a dense model

    def is_moe_layer(self, layer: int) -> bool:
        """Does layer `layer`, counted from 0 over the whole model, route tokens to experts?"""
        return self.moe is not None and self.moe.layers[layer]

    @property
    def dense_ffn_size(self) -> int:
        """Columns of the MLPs without experts; 0 where there are none."""
        return 0 if self.moe is not None and all(self.moe.layers) else self.ffn_size

    def check_sequence_length(self, longest: int) -> None:
        """Raises ModelError if a sequence of `longest` tokens would need attention through a sliding window."""
        if self.sliding_window is not None and longest > self.sliding_window:
            raise ModelError(
                f"sliding_window = {self.sliding_window} in config.json, and a sequence may have {longest} tokens: "
                "actor.strategy=megatron has full attention only. Shorten data.max_prompt_length or "
                "data.max_response_length, or use actor.strategy=fsdp2."
            )


@dataclass(frozen=True, slots=True)
class MoeDims:
    """The expert layers of a mixture-of-experts model."""

    n_experts: int
    n_active: int  # experts a token goes through
    ffn_size: int  # of one expert
    normalize_weights: bool  # the weights of a token's experts sum to 1
    layers: tuple[bool, ...]  # by layer: has it experts? If not, a dense MLP


def read_hf_dims(model_path: str | Path) -> HfDims:
    """Reads config.json of a local HF folder.

    The load-balancing loss of a mixture of experts (router_aux_loss_coef) is no part of distillation: the loss is the
    configured divergence alone, as in HF without output_router_logits. A config that asks for it is refused.

    Raises:
        ModelError: no such folder, unreadable config, unsupported architecture or feature; names it.
    """
    folder = Path(model_path)
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder} is not a HF model folder: it has no config.json. Set model.path to a local folder.")
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"{folder}/config.json cannot be read: {error}") from error
    if config.model_type not in SUPPORTED_ARCHITECTURES:
        raise ModelError(
            f"{folder}: model_type {config.model_type!r} is not supported by actor.strategy=megatron; "
            f"supported are {', '.join(SUPPORTED_ARCHITECTURES)}. actor.strategy=fsdp2 takes any causal language model."
        )
    _refuse_unsupported_features(folder, config)
    qk_norm, qkv_bias = SUPPORTED_ARCHITECTURES[config.model_type]
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return HfDims(
        model_type=config.model_type,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        ffn_size=config.intermediate_size,
        n_layers=config.num_hidden_layers,
        n_heads=config.num_attention_heads,
        n_kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        norm_eps=config.rms_norm_eps,
        max_positions=config.max_position_embeddings,
        tied_embeddings=bool(config.tie_word_embeddings),
        qk_norm=qk_norm,
        qkv_bias=qkv_bias,
        rope_inv_freq=_rope_inv_freq(folder, config, head_dim),
        sliding_window=getattr(config, "sliding_window", None) if config.model_type == "mistral" else None,
        moe=_moe_dims(folder, config) if config.model_type == "qwen3_moe" else None,
    )


def _moe_dims(folder: Path, config: PretrainedConfig) -> MoeDims | None:
    """None where every layer is dense."""
    n_experts, n_active, step = config.num_experts, config.num_experts_per_tok, config.decoder_sparse_step
    if config.output_router_logits:
        raise ModelError(
            f"{folder}: output_router_logits = True asks for the router's load-balancing loss, which distillation does "
            "not have; set it to false."
        )
    if step < 1:
        raise ModelError(f"{folder}: decoder_sparse_step = {step}; it must be at least 1.")
    layers = tuple(
        n_experts > 0 and layer not in config.mlp_only_layers and (layer + 1) % step == 0
        for layer in range(config.num_hidden_layers)
    )
    if not any(layers):
        return None
    if not 1 <= n_active <= n_experts:
        raise ModelError(f"{folder}: num_experts_per_tok = {n_active} is not in 1 .. num_experts = {n_experts}.")
    if n_active == 1 and config.norm_topk_prob:
        raise ModelError(
            f"{folder}: norm_topk_prob = True with num_experts_per_tok = 1 weights every expert with 1, so its router "
            "cannot learn; set norm_topk_prob to false."
        )
    return MoeDims(n_experts, n_active, config.moe_intermediate_size, bool(config.norm_topk_prob), layers)


def _refuse_unsupported_features(folder: Path, config: PretrainedConfig) -> None:
    """Anything that would make the Megatron model compute something else than the HF one."""
    unsupported = {
        "use_sliding_window": getattr(config, "use_sliding_window", False),
        "attention_bias": getattr(config, "attention_bias", False),
        "mlp_bias": getattr(config, "mlp_bias", False),
        "attention_dropout": getattr(config, "attention_dropout", 0.0),
    }
    for key, value in unsupported.items():
        if value:
            raise ModelError(f"{folder}: {key} = {value!r} is not supported by actor.strategy=megatron.")
    if config.hidden_act != "silu":
        raise ModelError(
            f"{folder}: hidden_act = {config.hidden_act!r} is not supported by actor.strategy=megatron, only 'silu'."
        )


def _rope_inv_freq(folder: Path, config: PretrainedConfig, head_dim: int) -> tuple[float, ...]:
    """[head_dim / 2] rotation per position, radians, computed by transformers for every scaled kind.

    Megatron's own llama3 scaling hard-codes three of the four numbers that a config may set.
    """
    # transformers 5 keeps theta and scaling together in rope_parameters, whatever the file says.
    rope: dict[str, Any] = dict(config.rope_parameters)
    kind = rope.get("rope_type", "default")
    if kind not in _SUPPORTED_ROPE or rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ModelError(
            f"{folder}: rope_parameters {rope!r} is not supported by actor.strategy=megatron; "
            f"supported rope_type: {', '.join(_SUPPORTED_ROPE)}, without partial rotation."
        )
    if kind == "default":
        exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
        inv_freq = 1.0 / (float(rope["rope_theta"]) ** exponents)
    else:
        inv_freq, attention_scaling = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
        if not math.isclose(attention_scaling, 1.0):
            raise ModelError(f"{folder}: rope_type {kind!r} scales attention by {attention_scaling}; not supported.")
    return tuple(inv_freq.tolist())
