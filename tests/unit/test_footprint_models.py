"""Read a model folder: missing sizes, invalid sizes, and the files that count."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from gkd.errors import ModelError
from gkd.hf.families import FAMILIES
from gkd.hf.model_dims import check_actor_split, check_megatron_support, read_dims
from gkd.hf.model_folder import tensor_shapes
from tests.refusals import refuses
from tests.unit.test_footprint import QWEN25_15B

# What no architecture is without; the rest may be left to its defaults.
NEEDED = {"vocab_size": 512, "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 32, "pad_token_id": 0}
MOE = {**NEEDED, "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize(
    "change",
    [
        {},
        {"num_key_value_heads": 4, "intermediate_size": 640, "max_position_embeddings": 99},
        {"head_dim": 24, "tie_word_embeddings": True, "sliding_window": None},
    ],
)
def test_the_sizes_are_those_of_the_real_model(kind: str, change: dict[str, Any]) -> None:
    """Fails if a formula forgets a bias, a norm or a router, what config.json leaves out is not what the architecture
    has then, or the driver, which reads the file, and a rank, which reads transformers, build another model.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    if kind in ("qwen2", "qwen3", "llama"):  # the others accept no null here
        change = {"num_key_value_heads": None, **change}
    if kind == "qwen3_moe":
        change = (
            {"mlp_only_layers": [1], **change} if "head_dim" not in change else {"decoder_sparse_step": 2, **change}
        )
    raw = {"model_type": kind, **NEEDED, **change}
    parsed = AutoConfig.for_model(**raw)
    dims = read_dims(raw)
    assert dims == read_dims(parsed.to_dict())
    assert (dims.max_positions, dims.n_kv_heads) == (parsed.max_position_embeddings, parsed.num_key_value_heads)
    assert (0 if dims.moe is None else dims.moe.n_active) == getattr(parsed, "num_experts_per_tok", 0)
    assert dims.sliding_window == (parsed.sliding_window if FAMILIES[kind].default_window is not None else None)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(parsed)
    assert dims.is_exact and dims.n_params == sum(param.numel() for param in model.parameters())
    layers = [sum(param.numel() for param in layer.parameters()) for layer in model.model.layers]
    assert [dims.dense_params(i) + dims.expert_params(i) for i in range(dims.n_layers)] == layers
    for each in (raw, parsed.to_dict()):
        check_megatron_support(each)


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "mscale": 1.0, "mscale_all_dim": 1.0}
YARN |= {"original_max_position_embeddings": 64, "llama_4_scaling_beta": 0.1}
ROPES: dict[str, tuple[dict[str, Any], bool]] = {
    "null": ({"rope_scaling": None}, True),
    "linear": ({"rope_scaling": {"type": "linear", "factor": 2.0}}, True),
    "llama3": (
        {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 512,
            }
        },
        True,
    ),
    "yarn": ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}}, False),
    "dynamic, the older spelling": ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, False),
    "partial": ({"partial_rotary_factor": 0.5}, False),
    "partial, GLM-4.5": ({"model_type": "glm4_moe", "partial_rotary_factor": 0.25, "num_key_value_heads": 4}, True),
    "yarn, GLM-4.5": ({"model_type": "glm4_moe", "rope_parameters": {**YARN}, "num_key_value_heads": 4}, False),
    "linear in some layers, Gemma 3": (
        {"model_type": "gemma3_text", "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        True,
    ),
    "none, Ministral 3": ({"model_type": "ministral3"}, True),
    "yarn, Ministral 3": ({"model_type": "ministral3", "rope_parameters": {**YARN}}, True),
    "that scales queries and keys": ({"model_type": "ministral3", "rope_parameters": {**YARN, "mscale": 0.5}}, False),
    "that does so by default": ({"model_type": "ministral3", "rope_parameters": {**YARN, "mscale": None}}, False),
    "without the scale": ({"model_type": "ministral3", "rope_parameters": {**YARN, "llama_4_scaling_beta": ""}}, False),
}


@pytest.mark.parametrize("name", ROPES)
def test_rotary_embeddings_that_megatron_supports(name: str) -> None:
    """Fails if preflight and a rank disagree about a rotary embedding, in any of its spellings in config.json."""
    from transformers import AutoConfig

    change, is_supported = ROPES[name]
    raw = {"model_type": "llama", **NEEDED, **change}
    for each in (raw, AutoConfig.for_model(**raw).to_dict()):
        with nullcontext() if is_supported else pytest.raises(ModelError):
            check_megatron_support(each)


@pytest.mark.parametrize(
    ("kind", "change", "word"),
    [
        ("qwen2_moe", {"use_sliding_window": True}, "use_sliding_window = True"),
        ("qwen2_moe", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ("qwen2_moe", {"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size = 0"),
        ("qwen3_moe", {"output_router_logits": True}, "output_router_logits = True"),
        ("qwen3_moe", {"num_experts_per_tok": 1, "norm_topk_prob": True}, "num_experts_per_tok = 1"),
        ("smollm3", {"attention_bias": True}, "attention_bias = True"),
        ("smollm3", {"mlp_bias": True}, "mlp_bias = True"),
        ("smollm3", {"layer_types": ["sliding_attention"] * 2}, "layer_types"),
        ("glm4_moe", {"output_router_logits": True}, "output_router_logits"),
        ("glm4_moe", {"n_group": 3}, "n_group = 3"),
        ("glm4_moe", {"n_group": 64, "topk_group": 1}, "topk_group = 1"),
        ("glm4_moe", {"routed_scaling_factor": None}, "routed_scaling_factor = None"),
        ("glm4_moe", {"num_experts_per_tok": 1}, "norm_topk_prob"),
        ("glm4_moe", {"n_shared_experts": 0}, "n_shared_experts = 0"),
        ("olmo2", {"attention_bias": True}, "attention_bias = True"),
        ("olmo2", {"hidden_act": "gelu"}, "hidden_act"),
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise = 0.1"),
        ("mixtral", {"num_experts_per_tok": 1}, "choose another model"),
        ("gemma3_text", {"hidden_activation": "gelu"}, "hidden_activation"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0"),
        ("gemma3_text", {"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0"),
        ("gemma3_text", {"layer_types": ["chunked_attention", "full_attention"]}, "layer_types"),
        ("gemma3_text", {"rope_parameters": {"sliding_attention": {"rope_type": "yarn"}}}, "rope_parameters"),
    ],
)
def test_features_of_a_family_that_megatron_lacks(kind: str, change: dict[str, Any], word: str) -> None:
    """Fails if a key of config.json that changes what a model computes is ignored."""
    raw = {"model_type": kind, **NEEDED, "num_key_value_heads": 4}
    check_megatron_support(raw)
    with pytest.raises(ModelError, match=word):
        check_megatron_support(raw | change)


def test_layers_that_an_olmo_lacks() -> None:
    """Fails if Transformer Engine's layers, which have other norms, compute an OLMo 2."""
    dims = read_dims({"model_type": "olmo2", **NEEDED})
    with refuses("actor.layers", "te"):
        check_actor_split(dims, tp=1, pp=1, vpp=1, ep=1, sequence_parallel=False, layers="te")


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"hidden_size": None}, "hidden_size or n_embd or d_model"),
        ({"num_key_value_heads": 5}, "num_key_value_heads"),
        ({"head_dim": [128]}, "head_dim"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({**MOE, "num_experts": -4}, "num_experts"),
        ({**MOE, "num_experts_per_tok": 9}, "num_experts_per_tok = 9"),
        ({**MOE, "decoder_sparse_step": "one"}, "decoder_sparse_step"),
        ({**MOE, "decoder_sparse_step": 0}, "decoder_sparse_step = 0"),
        ({**MOE, "mlp_only_layers": [[]]}, "mlp_only_layers"),
    ],
)
def test_sizes_that_are_none(change: dict[str, Any], word: str) -> None:
    """Fails if a wrong type in config.json is a traceback, or an absurd size an estimate."""
    with pytest.raises(ModelError, match=word):
        read_dims({**QWEN25_15B, **change})


def _save(path: Path, **tensors: int) -> None:
    from safetensors.torch import save_file

    save_file({name: torch.zeros(size) for name, size in tensors.items()}, path)


def test_only_files_that_are_loaded_count(tmp_path: Path) -> None:
    """Fails if an adapter's or an older copy's file next to the weights is counted as a part of the model."""
    _save(tmp_path / "model.safetensors", a=3)
    _save(tmp_path / "adapter_model.safetensors", b=5)
    assert tensor_shapes(tmp_path) == {"a": (3,)}
    _save(tmp_path / "model-00001-of-00002.safetensors", c=7)
    (tmp_path / "model.safetensors").unlink()
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"c": "model-00001-of-00002.safetensors"}}))
    assert tensor_shapes(tmp_path) == {"c": (7,)}
    index.write_text(json.dumps({"weight_map": {"c": "model-00002-of-00002.safetensors"}}))
    with pytest.raises(ModelError, match=r"model-00002-of-00002\.safetensors"):
        tensor_shapes(tmp_path)
    index.write_text("[]")
    with pytest.raises(ModelError):
        tensor_shapes(tmp_path)
