"""Configure Megatron's mixture-of-experts layer to compute the same as the HF one.

Every expert is a plain MLP that is whole on its rank; tokens reach it by all-to-all. No token is dropped, even if many
choose the same expert, so padding cannot displace real tokens.
"""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.moe import moe_utils

from gkd.actor.megatron.layout import ParallelLayout
from gkd.hf.model_dims import ModelDims


def expert_settings(dims: ModelDims, layout: ParallelLayout) -> dict[str, Any]:
    """Return the arguments of TransformerConfig for the experts; empty for a dense model."""
    if dims.moe is None:
        return {}
    if not hasattr(moe_utils, "te_general_gemm"):
        # Megatron's router reads this name, but defines it only if Transformer Engine is installed.
        moe_utils.te_general_gemm = None
    return {
        "num_moe_experts": dims.moe.n_experts,
        "moe_ffn_hidden_size": dims.moe.ffn_size,
        "moe_layer_freq": [int(is_moe) for is_moe in dims.moe.layers],
        "moe_router_topk": dims.moe.n_active,
        # A softmax over the chosen logits equals HF's over all of them, divided by the chosen ones' sum.
        "moe_router_pre_softmax": not dims.moe.normalize_weights,
        # In bfloat16, probabilities of many experts would tie.
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_grouped_gemm": False,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": 1,
    }
