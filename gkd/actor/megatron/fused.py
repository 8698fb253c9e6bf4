"""Compiled operations of a layer: the rotary embedding, and all that is between the product of queries, keys and
values and the attention.

After 8 variants of a function dynamo computes the next one uncompiled, with a warning only. So whatever changes from
batch to batch is marked as dynamic, where any number is one variant, also one that equals another number by chance.
The heads are constants. requires_grad would be another variant, so the functions compute with detached tensors and have
gradients of their own.

Letters: B sequences, S columns, G groups of queries that share a key, n queries of a group, D head size, R <= D rotated
columns.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.common.embeddings import rope_utils
from torch import Tensor
from torch._dynamo import maybe_mark_dynamic

_VARIANTS = 64  # of `_split_heads`; more are an error instead of a warning


def rms_norm(x: Tensor, weight: Tensor, eps: float, adds_one: bool) -> Tensor:
    """Normalize [..., H]. 1 + weight would lose digits in bfloat16, so transformers computes it in float32."""
    if not adds_one:
        return F.rms_norm(x, weight.shape, weight, eps)
    return F.rms_norm(x.float(), weight.shape, 1 + weight.float(), eps).to(x.dtype)


def install_fused_rope() -> None:
    """Let models with `apply_rope_fusion` use `rotate`, in the place where Megatron looks for Transformer Engine's.

    Models without it are not affected.
    """
    rope_utils.fused_apply_rotary_pos_emb = rotate


def rotate(values: Tensor, angles: Tensor, interleaved: bool = False) -> Tensor:
    """Rotate the pairs (d, d + R/2) of [S, B, heads, D] queries or keys, d < R/2, by [S, 1, 1, R] angles.

    RoPE, arXiv:2104.09864, equation 34, with the pairs of Llama.
    """
    width = angles.shape[-1]
    rotated = _Rotation.apply(values[..., :width], *_table(values, angles))
    return rotated if width == values.shape[-1] else torch.cat((rotated, values[..., width:]), dim=-1)


def split_heads(
    mixed: Tensor,
    angles: Tensor | None,
    weights: tuple[Tensor | None, Tensor | None],
    *,
    n_queries: int,
    eps: float,
    adds_one: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Split queries, keys and values, normalize queries and keys, and rotate them as `rotate` does.

    Args:
        mixed: [S, B, G, (n + 2) * D]: of each group its queries, its key and its value.
        angles: [S, 1, 1, R]; None: no rotation.
        weights: [D] of the norms of queries and keys; None: no norm.
        n_queries: n.
        eps, adds_one: see `rms_norm`.

    Returns:
        [S, B, G * n, D], [S, B, G, D], [S, B, G, D], contiguous.
    """
    table = (None, None) if angles is None else _table(mixed, angles)
    heads: tuple[Tensor, Tensor, Tensor] = _Heads.apply(mixed, *weights, *table, n_queries, eps, adds_one)
    return heads


def _table(values: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines of [S, 1, 1, D] angles.

    All layers of a micro-batch use the same, which are kept in an attribute of the angles.
    """
    rotation = getattr(angles, "gkd_rotation", None)
    if rotation is None or rotation[0].dtype != values.dtype:
        rotation = angles.cos().to(values.dtype), angles.sin().to(values.dtype)
        for part in rotation:
            maybe_mark_dynamic(part, 0)
        angles.gkd_rotation = rotation  # type: ignore[attr-defined]
    return rotation


class _Rotation(torch.autograd.Function):
    """Its gradient is the rotation back. Queries and keys of a model are two variants."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turned(_dynamic(values), cos, sin)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _turned_back(_dynamic(grads[0]), *ctx.saved_tensors), None, None


class _Heads(torch.autograd.Function):
    """Saves its input only if norms need it: a rotation has the same derivative everywhere."""

    @staticmethod
    def forward(
        ctx: Any, mixed: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, cos: Any, sin: Any, *sizes: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(None if q_weight is None else mixed, q_weight, k_weight, cos, sin)
        ctx.sizes = sizes
        return _split_heads(_dynamic(mixed), _constant(q_weight), _constant(k_weight), cos, sin, *sizes)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        mixed, q_weight, k_weight, cos, sin = ctx.saved_tensors
        inputs = (None if mixed is None else _dynamic(mixed), _constant(q_weight), _constant(k_weight), cos, sin)
        of_inputs = _split_heads_back(tuple(map(_dynamic, grads)), ctx.needs_input_grad[1], *inputs, *ctx.sizes)
        return *of_inputs, None, None, *(None for _ in ctx.sizes)


def _dynamic(values: Tensor) -> Tensor:
    values = values.detach()
    maybe_mark_dynamic(values, tuple(range(values.dim() - 2)))
    return values


def _constant(weight: Tensor | None) -> Tensor | None:
    return None if weight is None else weight.detach()


@torch.compile(dynamic=False)
def _turned(values: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = values.chunk(2, dim=-1)
    return values * cos + torch.cat((-second, first), dim=-1) * sin


@torch.compile(dynamic=False)
def _turned_back(values: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return _turned(values, cos, -sin)


def _heads(
    mixed: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    n_queries: int,
    eps: float,
    adds_one: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    size = mixed.shape[-1] // (n_queries + 2)
    queries, keys, values = mixed.split([n_queries * size, size, size], dim=-1)
    parts = []
    for part, weight in ((queries.unflatten(-1, (n_queries, size)).flatten(2, 3), q_weight), (keys, k_weight)):
        if weight is not None:
            part = rms_norm(part, weight, eps, adds_one)
        if cos is not None and sin is not None:
            width = cos.shape[-1]
            part = torch.cat((_turned(part[..., :width], cos, sin), part[..., width:]), dim=-1)
        parts.append(part.contiguous())
    return parts[0], parts[1], values.contiguous()


@torch.compile(dynamic=False, fullgraph=True, recompile_limit=_VARIANTS)
def _split_heads(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _heads(*inputs)


@torch.compile(dynamic=False, fullgraph=True, recompile_limit=_VARIANTS)
def _split_heads_back(
    grads: tuple[Tensor, Tensor, Tensor],
    trains: bool,
    mixed: Tensor | None,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    *rest: Any,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of mixed, and of the weights unless they are frozen or None."""
    n_queries = rest[2]
    if mixed is None:
        keys = grads[1]
        mixed = keys.new_zeros((*keys.shape[:-1], (n_queries + 2) * keys.shape[-1]))
    if q_weight is None or k_weight is None or not trains:
        _, back = torch.func.vjp(lambda x: _heads(x, q_weight, k_weight, *rest), mixed)
        return *back(grads), None, None
    _, back = torch.func.vjp(lambda x, q, k: _heads(x, q, k, *rest), mixed, q_weight, k_weight)
    of_inputs: tuple[Tensor, ...] = back(grads)
    return of_inputs
