"""Causal attention on torch's scaled_dot_product_attention, for Megatron's local layer spec.

Megatron's own local attention materialises [B * heads, S, S] scores; the one that does not needs
Transformer Engine. This one runs on both devices and keeps no S x S matrix.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


class CausalSdpaAttention(MegatronModule):
    """Drop-in for Megatron's `DotProductAttention` in a causal decoder without attention dropout.

    Sequences are padded on the right, so the causal mask alone keeps real tokens from seeing padding.
    """

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
        """[S, B, heads, D] queries, [S, B, kv_heads, D] keys and values -> [S, B, heads * D]."""
        if attention_mask is not None or attention_bias is not None or packed_seq_params is not None:
            raise ValueError("CausalSdpaAttention masks causally and nothing else; pass no mask, bias or packing")
        q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))  # [B, heads, S, D]
        context = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        return context.permute(2, 0, 1, 3).flatten(2)
