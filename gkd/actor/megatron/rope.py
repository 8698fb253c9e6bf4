"""Compile the rotary embedding to one kernel, in the place where Megatron looks for Transformer Engine's."""

from __future__ import annotations

import torch
from megatron.core.models.common.embeddings import rope_utils
from torch import Tensor


def install_fused_rope() -> None:
    """Let models with `apply_rope_fusion` use the functions below. Models without it are not affected."""
    rope_utils.fused_apply_rotary_pos_emb = rotate
    rope_utils.fused_apply_rotary_pos_emb_thd = rotate_packed


@torch.compile(dynamic=True)
def rotate(values: Tensor, angles: Tensor, interleaved: bool = False) -> Tensor:
    """Rotate the pairs (d, d + D/2) of [S, B, heads, D] queries or keys by [S, 1, 1, D] angles.

    RoPE, arXiv:2104.09864, equation 34, with the pairs of Llama.
    """
    return _rotated(values, angles)


@torch.compile(dynamic=True)
def rotate_packed(values: Tensor, cu_seqlens: Tensor, angles: Tensor, cp_size: int = 1, cp_rank: int = 0) -> Tensor:
    """Rotate [T, heads, D] queries or keys of packed sequences, each from position 0.

    Args:
        cu_seqlens: [n + 1] int32 boundaries of the sequences, on the device of `values`.
        angles: [at least the longest sequence, 1, 1, D] float32.
    """
    index = torch.arange(len(values), device=values.device, dtype=cu_seqlens.dtype)
    sequence = torch.bucketize(index, cu_seqlens[1:], right=True)
    return _rotated(values, angles[index - cu_seqlens[sequence], 0])


def _rotated(values: Tensor, angles: Tensor) -> Tensor:
    first, second = values.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return values * angles.cos().to(values.dtype) + turned * angles.sin().to(values.dtype)
