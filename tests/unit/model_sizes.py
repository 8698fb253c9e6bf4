"""config.json of public models, with what determines their layout and memory."""

from __future__ import annotations

from typing import Any

from tests.unit.test_footprint import QWEN25_15B


def _qwen3(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, **more: Any) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3MoeForCausalLM" if "num_experts" in more else "Qwen3ForCausalLM"],
        "model_type": "qwen3_moe" if "num_experts" in more else "qwen3",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "eos_token_id": 151645,
        **more,
    }


_EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True, "decoder_sparse_step": 1}
MODELS = {
    "Qwen2.5-1.5B-Instruct": QWEN25_15B,
    "Qwen3-1.7B": _qwen3(2048, 6144, 28, 16, 8, tie_word_embeddings=True),
    "Qwen3-4B": _qwen3(2560, 9728, 36, 32, 8, tie_word_embeddings=True),
    "Qwen3-8B": _qwen3(4096, 12288, 36, 32, 8),
    "Qwen3-32B": _qwen3(5120, 25600, 64, 64, 8),
    "Qwen3-30B-A3B-Instruct-2507": _qwen3(
        2048, 6144, 48, 32, 4, moe_intermediate_size=768, mlp_only_layers=[], **_EXPERTS
    ),
}
