"""Build Megatron's TransformerConfig for a student."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch._dynamo import maybe_mark_dynamic

from gkd.actor.megatron.experts import expert_settings
from gkd.actor.megatron.hf_config import MegatronDims
from gkd.actor.megatron.layout import ParallelLayout
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


# Compile the rotary embedding to one kernel, in the place where Megatron looks for Transformer Engine's.


def install_fused_rope() -> None:
    """Let models with `apply_rope_fusion` use the functions below. Models without it are not affected."""
    rope_utils.fused_apply_rotary_pos_emb = rotate
    rope_utils.fused_apply_rotary_pos_emb_thd = rotate_packed


def rotate(values: Tensor, angles: Tensor, interleaved: bool = False) -> Tensor:
    """Rotate the pairs (d, d + D/2) of [S, B, heads, D] queries or keys by [S, 1, 1, D] angles.

    RoPE, arXiv:2104.09864, equation 34, with the pairs of Llama.
    """
    return _Rotation.apply(values, angles, None)


def rotate_packed(values: Tensor, cu_seqlens: Tensor, angles: Tensor, cp_size: int = 1, cp_rank: int = 0) -> Tensor:
    """Rotate [T, heads, D] queries or keys of packed sequences, each from position 0.

    Args:
        cu_seqlens: [n + 1] int32 boundaries of the sequences, on the device of `values`.
        angles: [at least the longest sequence, 1, 1, D] float32.
    """
    return _Rotation.apply(values, angles, cu_seqlens)


class _Rotation(torch.autograd.Function):
    """Its gradient is the rotation back, so one kernel is compiled for both passes, with and without gradients."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, angles: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        ctx.save_for_backward(angles, cu_seqlens)
        return _kernel(values, angles, cu_seqlens)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        angles, cu_seqlens = ctx.saved_tensors
        return _kernel(grads[0], -angles, cu_seqlens), None, None


def _kernel(values: Tensor, angles: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Call the compiled rotation.

    After 8 variants of a function dynamo computes the next one uncompiled, with a warning only. So whatever changes
    from batch to batch is marked as dynamic, where any number is one variant, also one that equals another number by
    chance. The heads are constants: queries and keys of a model are two variants.
    """
    values = values.detach()  # requires_grad would be another variant
    for tensor, dims in ((values, tuple(range(values.dim() - 2))), (angles, (0,)), (cu_seqlens, (0,))):
        if tensor is not None:
            maybe_mark_dynamic(tensor, dims)
    return _turned(values, angles) if cu_seqlens is None else _turned_packed(values, angles, cu_seqlens)


@torch.compile(dynamic=False)
def _turned(values: Tensor, angles: Tensor) -> Tensor:
    first, second = values.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return values * angles.cos().to(values.dtype) + turned * angles.sin().to(values.dtype)


@torch.compile(dynamic=False)
def _turned_packed(values: Tensor, angles: Tensor, cu_seqlens: Tensor) -> Tensor:
    index = torch.arange(len(values), device=values.device, dtype=cu_seqlens.dtype)
    sequence = torch.bucketize(index, cu_seqlens[1:], right=True)
    return _turned(values, angles[index - cu_seqlens[sequence], 0])
