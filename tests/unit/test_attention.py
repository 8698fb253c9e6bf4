"""Compare causal attention over packed sequences, and its gradients, with dense attention and a mask."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gkd.actor.common.attention import Scores, causal_attention

LENGTHS = (5, 1, 9, 2)
PRESENT = torch.zeros(())  # sinks of as many heads as there are
SCORES = [
    *(Scores(), Scores(0.1), Scores(window=1), Scores(window=3), Scores(window=9), Scores(0.2, cap=1.5)),
    *(Scores(sinks=PRESENT), Scores(0.3, window=3, cap=0.7, sinks=PRESENT)),
]


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


def _dense(q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...], made: Scores) -> Tensor:
    """Compute attention with one [S, S] mask and an explicit softmax."""
    repeats = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
    mask = torch.block_diag(*[torch.ones((n, n)).tril() for n in lengths]).bool()
    if made.window is not None:
        mask &= torch.ones_like(mask).triu(1 - made.window)
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if made.scale is None else made.scale)
    scores = scores if made.cap is None else made.cap * (scores / made.cap).tanh()
    weights = scores.masked_fill(~mask, -torch.inf).exp()
    total = weights.sum(-1, keepdim=True)
    return (weights / (total if made.sinks is None else total + made.sinks.exp()[:, None, None])) @ v


def _with_grads(output: Tensor, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    total = (output * weights.to(output)).sum()
    return [output.detach(), *torch.autograd.grad(total, inputs)]


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("scores", SCORES, ids=str)
def test_equals_dense_attention(heads: tuple[int, int], packed: bool, scores: Scores) -> None:
    """Fails if a position sees the future or another sequence, heads are shared wrongly, or scores are others."""
    inputs = tuple(tensor.requires_grad_() for tensor in _inputs(*heads, rows=1 if packed else 3))
    lengths = LENGTHS if packed else (sum(LENGTHS),)
    if scores.sinks is not None:
        sinks = torch.linspace(-1, 1, heads[0], dtype=torch.float64).requires_grad_()
        scores = scores._replace(sinks=sinks)
        inputs = (*inputs, sinks)
    actual = _with_grads(causal_attention(*inputs[:3], _borders() if packed else None, scores=scores), inputs)
    for a, b in zip(actual, _with_grads(_dense(*inputs[:3], lengths, scores), inputs), strict=True):
        assert float((a - b).abs().max()) <= 1e-12


@pytest.mark.parametrize("scores", [SCORES[0], SCORES[-1]], ids=str)
def test_compiled_code_computes_a_pack(scores: Scores) -> None:
    """Fails if attention breaks a graph, or its operation there has other values or derivatives."""
    inputs = tuple(tensor.requires_grad_() for tensor in _inputs(4, 2))
    if scores.sinks is not None:
        sinks = torch.linspace(-1, 1, 4, dtype=torch.float64).requires_grad_()
        scores = scores._replace(sinks=sinks)
        inputs = (*inputs, sinks)

    def doubled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return 2 * causal_attention(2 * q, k, v, _borders(), scores=scores)

    compiled = torch.compile(doubled, backend="aot_eager", fullgraph=True)
    for a, b in zip(*(_with_grads(run(*inputs[:3]), inputs) for run in (compiled, doubled)), strict=True):
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
@pytest.mark.parametrize("window", [None, 3, 50])
def test_cuda(dtype: torch.dtype, head_dim: int, knows_length: bool, window: int | None) -> None:
    """Fails if the flash kernel gets wrong boundaries, a wrong window or a wrong layout."""
    inputs = tuple(t.cuda().to(dtype).requires_grad_() for t in _inputs(4, 2, head_dim=head_dim))
    longest = max(LENGTHS) if knows_length else None
    scores = Scores(0.1, window)
    actual = _with_grads(causal_attention(*inputs, _borders().cuda(), max_length=longest, scores=scores), inputs)
    exact_inputs = tuple(t.detach().double().cpu().requires_grad_() for t in inputs)
    for a, b in zip(actual, _with_grads(_dense(*exact_inputs, LENGTHS, scores), exact_inputs), strict=True):
        assert float((a.double().cpu() - b).abs().max()) <= 0.02 * max(1.0, float(b.abs().max()))
