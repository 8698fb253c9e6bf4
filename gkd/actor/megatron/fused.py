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

# More variants than this limit are an error instead of a warning.
_OPTIONS: Any = {"dynamic": False, "fullgraph": True, "recompile_limit": 64}


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
        eps, adds_one: of the norms; whether they multiply by 1 + weight.

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


def _normed_and_turned(
    heads: Tensor, weight: Tensor | None, cos: Tensor | None, sin: Tensor | None, eps: float, adds_one: bool
) -> Tensor:
    """Compute [S, B, G, m, D] heads, in float32 up to the rotation; `weight` is [D] or [m, D]."""
    if weight is not None:
        normed = F.rms_norm(heads.float(), heads.shape[-1:], eps=eps)
        heads = (normed * (weight.float() + adds_one)).to(heads.dtype)
    if cos is None or sin is None:
        return heads
    width = cos.shape[-1]
    rotated = _turned(heads[..., :width], cos[..., None, :], sin[..., None, :])
    return torch.cat((rotated, heads[..., width:]), dim=-1)


@torch.compile(**_OPTIONS)
def _split_heads(
    mixed: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, cos: Any, sin: Any, n: int, *norm: Any
) -> tuple[Tensor, Tensor, Tensor]:
    heads = mixed.unflatten(-1, (n + 2, -1))
    queries = _normed_and_turned(heads[..., :n, :], q_weight, cos, sin, *norm)
    keys = _normed_and_turned(heads[..., n : n + 1, :], k_weight, cos, sin, *norm)
    return queries.flatten(2, 3).contiguous(), keys.flatten(2, 3).contiguous(), heads[..., n + 1, :].contiguous()


@torch.compile(**_OPTIONS)
def _split_heads_back(
    grads: tuple[Tensor, Tensor, Tensor],
    trains: bool,
    mixed: Tensor | None,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Any,
    sin: Any,
    n: int,
    *norm: Any,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of mixed, and of the weights unless they are frozen or None.

    Queries and keys are computed together: that is half of the kernels, and in the forward pass none less.
    """
    queries, keys, values = grads
    of_turned = torch.cat((queries.unflatten(2, (-1, n)), keys.unflatten(2, (-1, 1))), dim=3)
    of_weights: tuple[Tensor | None, ...] = (None, None)
    back: Any
    if mixed is None or q_weight is None or k_weight is None:
        zeros = of_turned.new_zeros(of_turned.shape)
        back = torch.func.vjp(lambda x: _normed_and_turned(x, None, cos, sin, *norm), zeros)[1]
        (of_heads,) = back(of_turned)
    else:
        heads = mixed.unflatten(-1, (n + 2, -1))[..., : n + 1, :]
        weight = torch.cat((q_weight.expand(n, -1), k_weight[None])).float()
        back = torch.func.vjp(lambda x, w: _normed_and_turned(x, w, cos, sin, *norm), heads, weight)[1]
        of_heads, of_weight = back(of_turned)
        if trains:
            of_weights = (of_weight[:n].sum(0).to(q_weight.dtype), of_weight[n].to(k_weight.dtype))
    return torch.cat((of_heads, values.unflatten(2, (-1, 1))), dim=3).flatten(3), *of_weights
