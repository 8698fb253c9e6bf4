"""Wrap this project's causal attention as a core attention module of Megatron's layers.

Megatron's local attention materializes [B * heads, S, S] scores and refuses packed sequences. Its other one needs
Transformer Engine. This one runs on CPU and CUDA.
"""

from __future__ import annotations

from typing import Any

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from gkd.actor.common.attention import causal_attention


class CausalSdpaAttention(MegatronModule):
    """Replace Megatron's `DotProductAttention` in a causal decoder without attention dropout."""

    def __init__(self, config: TransformerConfig, layer_number: int, **_: Any) -> None:
        super().__init__(config=config)
        self.layer_number = layer_number

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Compute attention of [S, B, heads, D] queries and [S, B, kv_heads, D] keys and values: [S, B, heads * D].

        Packed sequences ("thd") have no dimension B.
        """
        if attention_mask is not None or attention_bias is not None:
            raise ValueError("CausalSdpaAttention supports only the causal mask; pass neither a mask nor a bias")
        if packed_seq_params is None:
            q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))  # [B, heads, S, D]
            return causal_attention(q, k, v, None).permute(2, 0, 1, 3).flatten(2)
        q, k, v = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))  # [1, heads, S, D]
        context = causal_attention(q, k, v, packed_seq_params.cu_seqlens_q, max_length=packed_seq_params.max_seqlen_q)
        return context[0].transpose(0, 1).flatten(1)
