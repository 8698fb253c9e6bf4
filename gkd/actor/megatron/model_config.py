"""Build Megatron's TransformerConfig for a student."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig

from gkd.actor.megatron.experts import expert_settings
from gkd.actor.megatron.hf_config import MegatronDims
from gkd.actor.megatron.layout import ParallelLayout
from gkd.actor.megatron.rope import install_fused_rope
from gkd.errors import ConfigError

# actor.recompute -> Megatron's settings
_RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}


def transformer_config(
    dims: MegatronDims,
    layout: ParallelLayout,
    *,
    dtype: torch.dtype,
    device: torch.device,
    recompute: str,
    sequence_parallel: bool,
    fused: bool = False,
) -> TransformerConfig:
    """Return Megatron's configuration of a RMSNorm + SwiGLU + rotary decoder, dense or with experts.

    Args:
        recompute, sequence_parallel: see `build_model`.
        fused: compile SwiGLU and the rotary embedding to one kernel each.

    Raises:
        ConfigError: actor.recompute is not a valid choice, or actor.sequence_parallel is set with one TP rank.
    """
    if recompute not in _RECOMPUTE:
        choices = ", ".join(_RECOMPUTE)
        raise ConfigError("actor.recompute", recompute, "is not a valid choice.", f"use one of {choices}.")
    if sequence_parallel and layout.tp == 1:
        raise ConfigError("actor.sequence_parallel", True, "there is one TP rank.", "use false, or actor.tp > 1.")
    if fused:
        install_fused_rope()
    return TransformerConfig(
        **expert_settings(dims, layout),
        num_layers=dims.n_layers,
        hidden_size=dims.hidden_size,
        ffn_hidden_size=dims.ffn_size,
        num_attention_heads=dims.n_heads,
        num_query_groups=dims.n_kv_heads,
        kv_channels=dims.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=dims.norm_eps,
        qk_layernorm=dims.qk_norm,
        add_bias_linear=False,
        add_qkv_bias=dims.qkv_bias,
        gated_linear_unit=True,
        activation_func=F.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        sequence_parallel=sequence_parallel,
        # Interleaved stages send forward and backward at once. With batched sends and two stages (the next one is also
        # the previous one), a gradient would be received as an activation, and the model would train on it.
        overlap_p2p_comm=layout.vpp > 1,
        batch_p2p_comm=layout.vpp == 1,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        # Micro-batches differ in S. Megatron then requires this dispatcher, also for dense models.
        variable_seq_lengths=layout.pp > 1,
        moe_token_dispatcher_type="alltoall",
        # Gradients of loss sums, divided once by the global number of tokens in finalize_model_grads.
        calculate_per_token_loss=True,
        # Weights come from the HF folder, so random initialization would be discarded.
        perform_initialization=False,
        use_cpu_initialization=device.type == "cpu",
        **_RECOMPUTE[recompute],
        # These need torch.compile only. SwiGLU then saves its input instead of every intermediate result.
        bias_activation_fusion=fused,
        apply_rope_fusion=fused,
        # These need apex or Transformer Engine, or do nothing for a model without dropout and attention scores.
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
    )
