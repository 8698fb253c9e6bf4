"""Compute causal attention over padded or packed sequences, for both backends of the student.

Packed sequences are concatenated in one row, and must not attend to one another. A mask for that would be [S, S] over
the whole pack. Instead, every sequence is a call of its own, or one variable-length kernel computes all of them.

Letters: B rows, S columns, D head size, n sequences of a pack.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from gkd.actor.common.torch_versions import gqa_option

# Supported by the flash kernels behind varlen_attn.
_VARLEN_DTYPES = (torch.bfloat16, torch.float16)
_VARLEN_MAX_HEAD_DIM, _VARLEN_HEAD_DIM_STEP = 256, 8
_CAUSAL_WINDOW = (-1, 0)  # everything to the left, nothing to the right


def causal_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | None,
    *,
    max_length: int | None = None,
    scale: float | None = None,
) -> Tensor:
    """Return softmax(scale q k^T) v, where each position attends to itself and the earlier ones of its sequence.

    Padding must be on the right; then the causal mask alone keeps real tokens from attending to it.

    Args:
        q: [B, heads, S, D].
        k, v: [B, kv_heads, S, D]; kv_heads divides heads, and neighboring heads share one.
        cu_seqlens: [n + 1] int32, on the device of q: sequence i is columns cu_seqlens[i] to cu_seqlens[i + 1], from 0
            to S, B = 1. None means each row is one sequence.
        max_length: length of the longest sequence, if known; on CUDA it saves a synchronization with the device.
        scale: of the scores; None means 1 / sqrt(D).

    Returns:
        [B, heads, S, D].

    Raises:
        ValueError: `cu_seqlens` with B > 1.
    """
    if cu_seqlens is None:
        return _sdpa(q, k, v, scale)
    if q.shape[0] != 1:
        raise ValueError(f"packed sequences must be one row, and q has {q.shape[0]}")
    if _has_varlen_kernel(q):
        return _varlen(q, k, v, cu_seqlens, max_length, scale)
    lengths = cu_seqlens.diff().tolist()
    parts = zip(*(tensor.split(lengths, dim=2) for tensor in (q, k, v)), strict=True)
    return torch.cat([_sdpa(a, b, c, scale) for a, b, c in parts], dim=2)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
    n_shared = q.shape[1] // k.shape[1]
    if n_shared > 1 and q.is_cuda and q.dtype not in _VARLEN_DTYPES:
        # Flash supports no float32, and the memory-efficient kernel no shared heads; the fallback needs [heads, S, S].
        k, v = (tensor.repeat_interleave(n_shared, dim=1) for tensor in (k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1], scale=scale)


def _has_varlen_kernel(q: Tensor) -> bool:
    head_dim = q.shape[-1]
    return (
        q.is_cuda
        and q.dtype in _VARLEN_DTYPES
        and head_dim <= _VARLEN_MAX_HEAD_DIM
        and head_dim % _VARLEN_HEAD_DIM_STEP == 0
    )


def _varlen(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_length: int | None, scale: float | None) -> Tensor:
    """Compute the pack in one call of torch's flash kernel, which requires [S, heads, D]."""
    longest = int(cu_seqlens.diff().max()) if max_length is None else max_length
    q, k, v = (tensor[0].transpose(0, 1).contiguous() for tensor in (q, k, v))
    context = varlen_attn(
        q,
        k,
        v,
        cu_seqlens,
        cu_seqlens,
        longest,
        longest,
        scale=scale,
        window_size=_CAUSAL_WINDOW,
        **gqa_option(varlen_attn, q.shape[1] != k.shape[1]),
    )
    assert isinstance(context, Tensor)  # it returns a tuple only on request
    return context.transpose(0, 1)[None]
