"""Compile the rotary embedding to one kernel, in the place where Megatron looks for Transformer Engine's."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.common.embeddings import rope_utils
from torch import Tensor
from torch._dynamo import maybe_mark_dynamic


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
