"""Replace the FlashAttention-2 of this process by FlashAttention-3 or -4, `actor.attention`, after comparing results.

torch dispatches to the other kernels for the whole process, so every model of the process is compared: the student, a
local teacher, and the reference. https://docs.pytorch.org/docs/stable/nn.attention.html
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
import torch.nn.attention
from torch import Tensor

from gkd.actor.common.attention import causal_attention
from gkd.errors import ConfigError

# value of actor.attention -> name of the implementation in torch, and where its kernels are
IMPLEMENTATIONS = {
    "fa3": ("FA3", "the package flash_attn_3 for Hopper, built for this torch"),
    "fa4": ("FA4", "the package flash-attn-4 for Hopper and Blackwell"),
}
_KEY, _FALLBACK = "actor.attention", "use auto."
_LENGTHS = (129, 1, 70)  # lengths of the compared pack; no multiples of a kernel's tiles
_LARGEST_ERROR = 2e-2  # relative, Frobenius norm; 16-bit kernels have 0.3 to 0.5%


class Heads(NamedTuple):
    """Shape of a model's attention on one rank."""

    n_heads: int
    n_kv_heads: int
    head_dim: int


def use_flash_attention(attention: str, models: Iterable[Heads], dtype: torch.dtype, device: torch.device) -> None:
    """Replace torch's kernels by the kernels of `actor.attention`, fa3 or fa4, and compare results. Takes seconds.

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
    except (ImportError, OSError, RuntimeError, AttributeError) as error:  # another torch's package, or an older torch
        problem = f"its kernels cannot be loaded: {type(error).__name__}: {error}."
        raise ConfigError(_KEY, attention, problem, f"install {package}, or {_FALLBACK}") from error


def check_heads(attention: str, heads: Heads, dtype: torch.dtype, device: torch.device) -> None:
    """Compare packed and padded attention and their gradients with float32, which has no flash kernel.

    Raises:
        ConfigError: the kernels refuse this shape, or their relative error is above 2%.
    """
    what = f"{heads.n_heads} heads, {heads.n_kv_heads} of keys and values, of {heads.head_dim}"
    generator = torch.Generator(device).manual_seed(0)
    shapes = [(1, n, sum(_LENGTHS), heads.head_dim) for n in (heads.n_heads, heads.n_kv_heads, heads.n_kv_heads)]
    inputs = [torch.randn(shape, device=device, generator=generator).to(dtype) for shape in shapes]
    weights = torch.randn(shapes[0], device=device, generator=generator).to(dtype)
    pack = torch.tensor([0, *_LENGTHS], device=device).cumsum(0).int()
    for cu_seqlens in (pack, None):
        exact = _with_gradients([x.float() for x in inputs], weights.float(), cu_seqlens)
        try:
            found = _with_gradients(inputs, weights, cu_seqlens)
        except Exception as error:  # the kernels are compiled at run time and may raise anything
            problem = f"its kernels refuse {what}: {type(error).__name__}: {error}."
            raise ConfigError(_KEY, attention, problem, _FALLBACK) from error
        worst = max(float((a.float() - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True))
        if not worst <= _LARGEST_ERROR:
            problem = f"with {what} its relative error is {worst:.1e}, of at most {_LARGEST_ERROR:.0e}."
            raise ConfigError(_KEY, attention, problem, _FALLBACK)


def _with_gradients(inputs: Sequence[Tensor], weights: Tensor, cu_seqlens: Tensor | None) -> list[Tensor]:
    """Return the output, and the gradients of its weighted sum."""
    q, k, v = (x.detach().requires_grad_() for x in inputs)
    output = causal_attention(q, k, v, cu_seqlens, max_length=max(_LENGTHS))
    return [output.detach(), *torch.autograd.grad(output, (q, k, v), weights)]
