"""Compare causal attention over packed sequences, and its gradients, with dense attention and a mask."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gkd.actor.common.attention import causal_attention

LENGTHS = (5, 1, 9, 2)


def _inputs(n_heads: int, n_kv_heads: int, *, rows: int = 1, head_dim: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(n_heads * 10 + n_kv_heads)
    size = sum(LENGTHS)
    return (
        torch.randn((rows, n_heads, size, head_dim), generator=generator, dtype=torch.float64),
        torch.randn((rows, n_kv_heads, size, head_dim), generator=generator, dtype=torch.float64),
        torch.randn((rows, n_kv_heads, size, head_dim), generator=generator, dtype=torch.float64),
    )


def _borders() -> Tensor:
    return torch.tensor((0, *LENGTHS)).cumsum(0).int()


def _dense(q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...], scale: float | None = None) -> Tensor:
    """Compute attention with one [S, S] mask and an explicit softmax."""
    repeats = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
    mask = torch.block_diag(*[torch.ones((n, n)).tril() for n in lengths]).bool()
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scores = (q @ k.transpose(-1, -2) * scale).masked_fill(~mask, -torch.inf)
    return scores.softmax(dim=-1) @ v


def _with_grads(output: Tensor, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    total = (output * weights.to(output)).sum()
    return [output.detach(), *torch.autograd.grad(total, inputs)]


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("scale", [None, 0.1])
def test_equals_dense_attention(heads: tuple[int, int], packed: bool, scale: float | None) -> None:
    """Fails if a position sees the future or another sequence, heads are shared wrongly or scores scaled otherwise."""
    inputs = tuple(tensor.requires_grad_() for tensor in _inputs(*heads, rows=1 if packed else 3))
    lengths = LENGTHS if packed else (sum(LENGTHS),)
    actual = _with_grads(causal_attention(*inputs, _borders() if packed else None, scale=scale), inputs)
    for a, b in zip(actual, _with_grads(_dense(*inputs, lengths, scale), inputs), strict=True):
        assert float((a - b).abs().max()) <= 1e-12


def test_a_pack_is_one_row() -> None:
    """Fails if several packed rows are split by the boundaries of one."""
    with pytest.raises(ValueError):
        causal_attention(*_inputs(2, 2, rows=2), _borders())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 12])  # 12: no kernel for it, so one call per sequence
@pytest.mark.parametrize("knows_length", [True, False])
def test_cuda(dtype: torch.dtype, head_dim: int, knows_length: bool) -> None:
    """Fails if the flash kernel gets wrong boundaries, a wrong window or a wrong layout."""
    inputs = tuple(t.cuda().to(dtype).requires_grad_() for t in _inputs(4, 2, head_dim=head_dim))
    longest = max(LENGTHS) if knows_length else None
    actual = _with_grads(causal_attention(*inputs, _borders().cuda(), max_length=longest, scale=0.1), inputs)
    exact_inputs = tuple(t.detach().double().cpu().requires_grad_() for t in inputs)
    exact = _with_grads(_dense(*exact_inputs, LENGTHS, 0.1), exact_inputs)
    for a, b in zip(actual, exact, strict=True):
        assert float((a.double().cpu() - b).abs().max()) <= 0.02 * max(1.0, float(b.abs().max()))
