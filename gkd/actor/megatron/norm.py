"""RMSNorm of Megatron's local layers."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.autograd.function import once_differentiable


class RmsNorm(torch.nn.RMSNorm):
    """torch's RMSNorm with the attribute that makes Megatron sum its gradient over TP under sequence parallelism.

    Megatron's wrapper of the same torch module refuses `sequence_parallel`.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        normed: Tensor = _RmsNormOnCpu.apply(x, self.weight, self.eps) if x.is_cpu else super().forward(x)
        return normed


class _RmsNormOnCpu(torch.autograd.Function):
    """RMSNorm that saves its input alone, as torch's kernel on CUDA does.

    On the CPU torch composes it of separate operations, which take longer and save two tensors.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = _at_least_float32(x)
        scale = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, scale, weight)
        return (wide * scale).mul_(weight).type_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        """With y = n w and n = x s: dw = sum(g n), dx = s (g w - n mean(g w n))."""
        x, scale, weight = ctx.saved_tensors
        wide, weight_of = _at_least_float32(grad), _at_least_float32(weight)
        normed = _at_least_float32(x) * scale
        product = (wide * normed).flatten(end_dim=-2)
        mean = torch.mv(product, weight_of).div_(x.shape[-1]).view_as(scale)
        grad_x = (wide * weight_of).addcmul_(normed, mean, value=-1).mul_(scale)
        return grad_x.type_as(x), product.sum(0).type_as(weight), None


def _at_least_float32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
