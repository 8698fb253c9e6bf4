"""Refuse models that the Megatron student does not support, from config.json alone. Pure: no torch, no transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gkd.errors import ModelError
from gkd.hf.model_dims import read_dims

MEGATRON_ARCHITECTURES = ("qwen3", "qwen2", "llama", "mistral", "qwen3_moe")
# Frequencies that depend on nothing but the config; "dynamic" and others change with the sequence.
_ROPE_TYPES = ("default", "linear", "llama3")
_OTHER_BACKEND = "set actor.strategy=fsdp2, which takes any causal language model."


def check_megatron_support(config_json: Mapping[str, Any], where: str = "config.json") -> None:
    """Refuse a model that the Megatron student would compute otherwise than transformers does.

    The load-balancing loss of a mixture of experts (router_aux_loss_coef) is not a part of distillation. The loss is
    the configured divergence alone, as in transformers without output_router_logits; a config that sets it is refused.

    Args:
        config_json: the file's content, or a transformers config as a dictionary.
        where: names the file in the error.

    Raises:
        ModelError: the architecture or a feature is not supported; names it.
    """
    model_type, strategy = config_json.get("model_type", ""), "actor.strategy=megatron"
    if model_type not in MEGATRON_ARCHITECTURES:
        raise ModelError(
            f"{where}: model_type {model_type!r} is not supported by {strategy}; supported are "
            f"{', '.join(MEGATRON_ARCHITECTURES)}.",
            "set actor.strategy=fsdp2 and, if you trust the code in the folder, model.trust_remote_code=true."
            if "auto_map" in config_json
            else _OTHER_BACKEND,
        )
    supported = {
        "use_sliding_window": False,
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
    }
    for key, value in supported.items():
        found = config_json.get(key, value)
        if (found or value) != value:
            problem = f"{where}: {key} = {found!r} is not supported by {strategy}, only {value!r}."
            raise ModelError(problem, _OTHER_BACKEND)
    rope = config_json.get("rope_parameters") or config_json.get("rope_scaling") or {}
    rotated = rope.get("partial_rotary_factor", config_json.get("partial_rotary_factor"))
    if rope.get("rope_type", rope.get("type", "default")) not in _ROPE_TYPES or rotated not in (None, 1.0):
        raise ModelError(
            f"{where}: rope_parameters {rope!r} is not supported by {strategy}; "
            f"supported rope_type: {', '.join(_ROPE_TYPES)}, without partial rotation.",
            _OTHER_BACKEND,
        )
    if model_type == "qwen3_moe":
        _check_router(config_json, where)


def _check_router(config_json: Mapping[str, Any], where: str) -> None:
    if config_json.get("output_router_logits"):
        raise ModelError(
            f"{where}: output_router_logits = True adds the router's load-balancing loss, which distillation does not "
            "have.",
            "set output_router_logits to false in config.json.",
        )
    moe = read_dims(config_json).moe
    if moe is not None and moe.n_active == 1 and moe.normalize_weights:
        raise ModelError(
            f"{where}: norm_topk_prob = True with num_experts_per_tok = 1 weights every expert with 1, so its router "
            "cannot learn.",
            "set norm_topk_prob to false in config.json.",
        )
