"""Compute causal attention over padded or packed sequences, for both backends of the student.

Packed sequences are concatenated in one row, and must not attend to one another. A mask for that would be [S, S] over
the whole pack. Instead, every sequence is a call of its own, or one variable-length kernel computes all of them.

Ranks of a context-parallel group exchange columns for heads, so that attention sees whole sequences: one all-to-all
before attention gives each rank all columns of heads / cp heads, and one afterwards its own columns of all heads
(Ulysses, arXiv:2309.14509). Every rank then has the same share of the causal scores, whatever the lengths of the
sequences. `gkd.data.columns` defines the columns of each rank.

Letters: B rows, S columns, s = S / cp columns of a rank, D head size, n sequences of a pack.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.attention
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from gkd.errors import ConfigError

_VARLEN_DTYPES = (torch.bfloat16, torch.float16)  # supported by the flash kernels behind varlen_attn


class Scores(NamedTuple):
    """Changes that a model makes to the scores of its attention, besides the causal mask."""

    scale: float | None = None  # None: 1 / sqrt(D)
    window: int | None = None  # a position attends to itself and to `window - 1` positions before it
    cap: float | None = None  # a score is cap * tanh(score / cap)
    sinks: Tensor | None = None  # [heads]: the score of one more position, which has no value


def causal_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | None,
    *,
    max_length: int | None = None,
    scores: Scores = Scores(),  # noqa: B008, immutable
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Return softmax(scores) v, where each position attends to itself and the earlier ones of its sequence.

    Padding must be on the right; then the causal mask alone keeps real tokens from attending to it.

    Args:
        q: [B, heads, S, D].
        k, v: [B, kv_heads, S, D]; kv_heads divides heads, and neighboring heads share one.
        cu_seqlens: [n + 1] int32, on the device of q: sequence i is columns cu_seqlens[i] to cu_seqlens[i + 1], from 0
            to S, B = 1. None means each row is one sequence.
        max_length: length of the longest sequence, if known; on CUDA it saves a synchronization with the device.
        scores: what is done with q k^T. A cap or sinks take [heads, S, S] memory for each sequence.
        group: ranks that have neighboring columns of the same rows; q, k, v and the result are of this rank's columns,
            and `cu_seqlens` of all. The call is a collective.

    Returns:
        [B, heads, S, D].

    Raises:
        ValueError: `cu_seqlens` with B > 1.
    """
    if group is not None and group.size() > 1:
        if scores.sinks is not None:
            scores = scores._replace(sinks=scores.sinks.chunk(group.size())[group.rank()])
        q, k, v = all_columns(q, k, v, group)
        return own_columns(causal_attention(q, k, v, cu_seqlens, max_length=max_length, scores=scores), group)
    if cu_seqlens is None:
        return _one(q, k, v, scores)
    if q.shape[0] != 1:
        raise ValueError(f"packed sequences must be one row, and q has {q.shape[0]}")
    if _has_varlen_kernel(q) and scores.cap is None and scores.sinks is None:
        return _varlen(q, k, v, cu_seqlens, max_length, scores)
    if torch.compiler.is_compiling():
        of_pack: Tensor = _compiled_each(q, k, v, cu_seqlens, scores.sinks, scores.scale, scores.window, scores.cap)
        return of_pack
    return _each(q, k, v, cu_seqlens, scores)


def _each(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scores: Scores) -> Tensor:
    """Compute the sequences of a pack one after the other."""
    lengths = cu_seqlens.diff().tolist()
    sequences = zip(*(tensor.split(lengths, dim=2) for tensor in (q, k, v)), strict=True)
    return torch.cat([_one(a, b, c, scores) for a, b, c in sequences], dim=2)


def _one(q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> Tensor:
    """Compute rows that are one sequence each."""
    size = q.shape[2]
    window = size if scores.window is None else scores.window
    mask = (
        torch.ones((size, size), dtype=torch.bool, device=q.device).tril().triu(1 - window) if window < size else None
    )
    if scores.cap is None and scores.sinks is None:
        return _sdpa(q, k, v, mask, scores.scale)
    if mask is None:
        mask = torch.ones((size, size), dtype=torch.bool, device=q.device).tril()
    k, v = (tensor.repeat_interleave(q.shape[1] // tensor.shape[1], dim=1) for tensor in (k, v))
    logits = q @ k.mT * (q.shape[-1] ** -0.5 if scores.scale is None else scores.scale)
    if scores.cap is not None:
        logits = scores.cap * torch.tanh(logits / scores.cap)
    logits = logits.masked_fill(~mask, -torch.inf)
    if scores.sinks is not None:
        logits = torch.cat([logits, scores.sinks.to(logits.dtype)[:, None, None].expand(*logits.shape[:3], 1)], dim=-1)
    weights = logits.softmax(-1, dtype=torch.promote_types(q.dtype, torch.float32))[..., :size]
    return weights.to(v.dtype) @ v


# `_each` as one operation of compiled code, which cannot contain a loop over lengths that only the data has. Its
# backward pass computes the scores again, because an operation cannot hand over the graph of what it computed.


@torch.library.custom_op("gkd::attention_of_pack", mutates_args=())
def _compiled_each(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    sinks: Tensor | None,
    scale: float | None,
    window: int | None,
    cap: float | None,
) -> Tensor:
    return _each(q, k, v, cu_seqlens, Scores(scale, window, cap, sinks)).contiguous()


@_compiled_each.register_fake
def _(q: Tensor, _k: Tensor, v: Tensor, *_: Any) -> Tensor:
    return q.new_empty((*q.shape[:3], v.shape[3]))


@torch.library.custom_op("gkd::attention_of_pack_backward", mutates_args=())
def _compiled_each_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    sinks: Tensor | None,
    scale: float | None,
    window: int | None,
    cap: float | None,
) -> list[Tensor]:
    inputs = [x.detach().requires_grad_() for x in (q, k, v, sinks) if x is not None]
    scores = Scores(scale, window, cap, None if sinks is None else inputs[3])
    # Within an operation torch records no graph, unless the key is taken from those that are left out.
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.AutogradFunctionality, False), torch.enable_grad():
        output = _each(inputs[0], inputs[1], inputs[2], cu_seqlens, scores)
        return [x.contiguous() for x in torch.autograd.grad(output, inputs, grad)]


@_compiled_each_backward.register_fake
def _(_: Tensor, q: Tensor, k: Tensor, v: Tensor, _cu: Tensor, sinks: Tensor | None, *_more: Any) -> list[Tensor]:
    return [x.new_empty(x.shape) for x in (q, k, v, sinks) if x is not None]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    del output
    ctx.save_for_backward(*inputs[:5])
    ctx.scores = inputs[5:]


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, of_sinks = (*_compiled_each_backward(grad, *ctx.saved_tensors, *ctx.scores), None)[:4]
    return q, k, v, None, of_sinks, None, None, None


_compiled_each.register_autograd(_gradients, setup_context=_keep)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    shares = False  # not the comparison below: it is a symbol in compiled code, which torch's function does not take
    if q.shape[1] > k.shape[1]:
        # Flash supports neither float32 nor masks, and the memory-efficient kernel no shared heads; the fallback needs
        # [heads, S, S].
        shares = not q.is_cuda or (q.dtype in _VARLEN_DTYPES and mask is None)
        if not shares:
            k, v = (tensor.repeat_interleave(q.shape[1] // tensor.shape[1], dim=1) for tensor in (k, v))
    return F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, enable_gqa=shares, scale=scale)


def _has_varlen_kernel(q: Tensor) -> bool:
    head_dim = q.shape[-1]
    return q.is_cuda and q.dtype in _VARLEN_DTYPES and head_dim <= 256 and head_dim % 8 == 0


def _varlen(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_length: int | None, scores: Scores) -> Tensor:
    """Compute the pack in one call of torch's flash kernel, which requires [S, heads, D]."""
    longest = int(cu_seqlens.diff().max()) if max_length is None else max_length
    # To the left and to the right; -1: everything.
    window = (-1 if scores.window is None or scores.window >= longest else scores.window - 1, 0)
    # Not tensor[0]: its backward pass fills a tensor of zeros, and copies into it.
    q, k, v = (tensor.squeeze(0).transpose(0, 1).contiguous() for tensor in (q, k, v))
    context = varlen_attn(
        q,
        k,
        v,
        cu_seqlens,
        cu_seqlens,
        longest,
        longest,
        scale=scores.scale,
        window_size=window,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    assert isinstance(context, Tensor)  # it returns a tuple only on request
    return context.transpose(0, 1)[None]


# value of actor.attention -> name of the implementation in torch, and where its kernels are
IMPLEMENTATIONS = {
    "fa3": ("FA3", "the package flash_attn_3 for Hopper, built for this torch"),
    "fa4": ("FA4", "the package flash-attn-4 for Hopper and Blackwell"),
}
_KEY = "actor.attention"
_FALLBACK = "use auto."
_LENGTHS = (129, 1, 70)  # lengths of the compared pack; no multiples of a kernel's tiles
_LARGEST_ERROR = 2e-2  # relative, Frobenius norm; 16-bit kernels have 0.3 to 0.5%


class Heads(NamedTuple):
    """Shape of a model's attention on one rank."""

    n_heads: int
    n_kv_heads: int
    head_dim: int


def use_flash_attention(attention: str, models: Iterable[Heads], dtype: torch.dtype, device: torch.device) -> None:
    """Replace torch's kernels by the kernels of `actor.attention`, fa3 or fa4, and compare results. Takes seconds.

    torch dispatches to the other kernels for the whole process, so every model of the process is compared: the
    student, a local teacher, and the reference. https://docs.pytorch.org/docs/stable/nn.attention.html

    Args:
        models: shapes that this process will compute.
        dtype: of the queries.

    Raises:
        ConfigError: the device is not CUDA, the package is missing or of another torch, or its kernels refuse a shape
            or compute something else than torch.
    """
    if device.type != "cuda":
        raise ConfigError(_KEY, attention, f"FlashAttention has no kernels for {device.type}.", _FALLBACK)
    activate(attention)
    for heads in models:
        check_heads(attention, heads, dtype, device)


def activate(attention: str) -> None:
    """Let torch dispatch to the kernels of `fa3` or `fa4`. Raises ConfigError: they cannot be loaded."""
    name, package = IMPLEMENTATIONS[attention]
    try:
        torch.nn.attention.activate_flash_attention_impl(name)
    except (ImportError, OSError, RuntimeError, AttributeError) as error:  # another torch's package
        problem = f"its kernels cannot be loaded: {type(error).__name__}: {error}."
        raise ConfigError(_KEY, attention, problem, f"install {package}, or {_FALLBACK}") from error


def check_heads(attention: str, heads: Heads, dtype: torch.dtype, device: torch.device) -> None:
    """Compare attention, packed, with windows and padded, and its gradients with float32, which has no flash kernel.

    Raises:
        ConfigError: the kernels refuse this shape, or their relative error is above 2%.
    """
    what = f"{heads.n_heads} heads, {heads.n_kv_heads} of keys and values, of {heads.head_dim}"
    generator = torch.Generator(device).manual_seed(0)
    shapes = [(1, n, sum(_LENGTHS), heads.head_dim) for n in (heads.n_heads, heads.n_kv_heads, heads.n_kv_heads)]
    inputs = [torch.randn(shape, device=device, generator=generator).to(dtype) for shape in shapes]
    weights = torch.randn(shapes[0], device=device, generator=generator).to(dtype)
    pack = torch.tensor([0, *_LENGTHS], device=device).cumsum(0).int()
    for cu_seqlens, scores in ((pack, Scores()), (pack, Scores(window=50)), (None, Scores())):
        exact = _with_gradients([x.float() for x in inputs], weights.float(), cu_seqlens, scores)
        try:
            results = _with_gradients(inputs, weights, cu_seqlens, scores)
        except Exception as error:  # the kernels are compiled at run time and may raise anything
            problem = f"its kernels refuse {what}: {type(error).__name__}: {error}."
            raise ConfigError(_KEY, attention, problem, _FALLBACK) from error
        worst = max(float((a.float() - b).norm() / b.norm()) for a, b in zip(results, exact, strict=True))
        if not worst <= _LARGEST_ERROR:
            problem = f"with {what} its relative error is {worst:.1e}, of at most {_LARGEST_ERROR:.0e}."
            raise ConfigError(_KEY, attention, problem, _FALLBACK)


def _with_gradients(
    inputs: Sequence[Tensor], weights: Tensor, cu_seqlens: Tensor | None, scores: Scores
) -> list[Tensor]:
    """Return the output, and the gradients of its weighted sum."""
    q, k, v = (x.detach().requires_grad_() for x in inputs)
    output = causal_attention(q, k, v, cu_seqlens, max_length=max(_LENGTHS), scores=scores)
    return [output.detach(), *torch.autograd.grad(output, (q, k, v), weights)]


def all_columns(q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """Exchange this rank's columns of all heads for all columns of this rank's heads, in one all-to-all.

    Args:
        q: [B, heads, s, D]; the group's size divides heads.
        k, v: [B, kv_heads, s, D], D of its own. The size divides kv_heads, or is a multiple: then several ranks get the
            same head.

    Returns:
        The same tensors as [B, heads / cp, S, D].
    """
    n = group.size()
    copies = max(1, n // k.shape[1])
    k, v = (tensor[:, :, None].expand(-1, -1, copies, -1, -1).flatten(1, 2) for tensor in (k, v))
    # [s, B, heads, D] -> [cp, s, B, heads / cp, D] -> [cp, s, B, heads / cp * D]
    chunks = [tensor.permute(2, 0, 1, 3).unflatten(2, (n, -1)).movedim(2, 0).flatten(3) for tensor in (q, k, v)]
    received = _AllToAll.apply(torch.cat(chunks, dim=3), group).flatten(0, 1)  # [S, B, numbers of this rank's heads]
    of_heads = zip(received.split([part.shape[3] for part in chunks], dim=2), (q, k, v), strict=True)
    return [mine.unflatten(2, (-1, tensor.shape[3])).permute(1, 2, 0, 3) for mine, tensor in of_heads]


def own_columns(context: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Exchange all columns of this rank's heads for its columns of all: [B, heads / cp, S, D] -> [B, heads, s, D]."""
    chunks = context.permute(2, 0, 1, 3).unflatten(0, (group.size(), -1))
    received: Tensor = _AllToAll.apply(chunks, group)  # [cp, s, B, heads / cp, D]
    return received.movedim(0, 2).flatten(2, 3).permute(1, 2, 0, 3)


class _AllToAll(torch.autograd.Function):
    """Send part i of [cp, ...] to rank i, and return the parts received, in rank order. Its gradient does the same."""

    @staticmethod
    def forward(ctx: Any, chunks: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        chunks = chunks.contiguous()
        received = torch.empty_like(chunks)
        dist.all_to_all_single(received, chunks, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _AllToAll.apply(grads[0], ctx.group), None
