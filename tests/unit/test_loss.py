"""Test the student logprobs of one process (values, exact gradients, edge cases) and the token mean."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

from gkd.actor.common.step import sum_over_group, token_mean
from gkd.config.loss_spec import LossSpec, LossTerm
from gkd.errors import DataError, NumericsError
from gkd.loss import row_kernels
from gkd.loss.distill_loss import DistillLoss
from gkd.loss.vocab_parallel import VocabShard
from tests.unit.loss_cases import KERNELS, SHARD, V_PADDED, K, N, V, logprobs_of, normal, topk_of_mass, topk_targets


def _logits(dtype: torch.dtype = torch.float64) -> Tensor:
    return normal(N, V_PADDED, seed=1, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_logprobs_equal_log_softmax(dtype: torch.dtype, temperature: float) -> None:
    """Fails if padding gets probability, statistics are not float32, or the backward pass ignores the temperature."""
    logits = _logits(dtype)
    logits[:, V:] = 100.0  # padding that would swallow the softmax
    untouched = logits.clone()
    logits.requires_grad_()
    ids, _ = topk_of_mass(0.5)
    ids[0] = torch.tensor([0, V - 1, 1, V - 2])  # the edges
    rows = logprobs_of(logits, ids, temperature=temperature)
    dense = untouched.double()[:, :V].requires_grad_()
    every = torch.log_softmax(dense / temperature, dim=-1)
    expected = every.gather(1, ids)
    assert {t.dtype for t in rows} == {torch.float64 if dtype == torch.float64 else torch.float32}
    torch.testing.assert_close(rows.logprobs.double(), expected, atol=2e-6, rtol=1e-6)
    torch.testing.assert_close(rows.entropy.double(), -(every.exp() * every).sum(dim=-1), atol=2e-6, rtol=1e-6)
    torch.testing.assert_close(rows.log_normalizer.double(), (dense / temperature).logsumexp(-1), atol=2e-6, rtol=1e-6)
    weights = torch.linspace(-1, 2, N * K).view(N, K)
    (rows.logprobs * weights).sum().backward()
    (expected * weights).sum().backward()
    rounding = 1e-2 if dtype == torch.bfloat16 else 2e-6
    torch.testing.assert_close(logits.grad[:, :V].double(), dense.grad, atol=rounding, rtol=rounding)
    assert not logits.grad[:, V:].any()


def test_only_logprobs_are_differentiable() -> None:
    """Fails if entropy or normalizer claim to be differentiable: a loss on them would silently get no gradient."""
    rows = logprobs_of(_logits().requires_grad_(), topk_of_mass(0.5)[0])
    assert rows.logprobs.requires_grad and not rows.entropy.requires_grad and not rows.log_normalizer.requires_grad


def test_an_id_of_another_shard_is_not_column_0() -> None:
    """Fails if ids before or after a rank's columns are clamped into them, or its first and last column are missed."""
    shard = VocabShard(4, V, None)
    ids = torch.tensor([[3, 4, V - 1, -1, 0, V]])
    assert shard.columns(ids, 10).tolist() == [[-1, 0, V - 5, -1, -1, -1]]
    assert shard.columns(ids, 5).tolist() == [[-1, 0, -1, -1, -1, -1]]
    assert VocabShard(12, V, None).columns(ids, 4).tolist() == [[-1] * 6]
    assert [VocabShard(start, V, None).n_columns(4) for start in (0, 8, 12)] == [4, 3, 0]


def test_pieces_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a row at the boundary of two pieces is skipped or computed twice."""
    ids, _ = topk_of_mass(0.5)
    whole, pieces = _logits().requires_grad_(), _logits().requires_grad_()
    logprobs_of(whole, ids, temperature=0.7).logprobs.square().sum().backward()
    monkeypatch.setitem(row_kernels._PIECE_ELEMENTS, "cpu", 2 * V)
    assert len(row_kernels.pieces(pieces)) > 1
    logprobs_of(pieces, ids, temperature=0.7).logprobs.square().sum().backward()
    assert torch.equal(whole.grad, pieces.grad)  # type: ignore[arg-type]


def test_a_large_normalizer() -> None:
    """Fails if the shortcut for small logits is used where exp overflows: logits of +-300 in float32."""
    logits = _logits(torch.float32) * 100
    logits[0] += 300
    logits[1] -= 300
    logits.requires_grad_()
    ids = torch.stack([logits[:, :V].argmax(-1), logits[:, :V].argmin(-1)], dim=1)
    logprobs_of(logits, ids).logprobs.sum().backward()
    dense = logits.detach().double()[:, :V].requires_grad_()
    dense.log_softmax(-1).gather(1, ids).sum().backward()
    torch.testing.assert_close(logits.grad[:, :V].double(), dense.grad, atol=1e-5, rtol=1e-5)  # type: ignore[index]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_impossible_tokens_do_not_contribute_to_the_entropy(temperature: float) -> None:
    """Fails if a logit of -inf makes the reported entropy 0 * -inf = nan."""
    logits = _logits(torch.float32)
    possible = logits[:, 3:V].double() / temperature
    logits[:, :3] = -torch.inf
    rows = logprobs_of(logits, torch.full((N, 1), 5), temperature=temperature)
    log_q = possible.log_softmax(dim=-1)
    torch.testing.assert_close(rows.entropy.double(), -(log_q.exp() * log_q).sum(dim=-1), atol=2e-6, rtol=1e-6)


@pytest.mark.parametrize("bad_id", [-1, V, V_PADDED - 1])
def test_foreign_ids_are_refused(bad_id: int) -> None:
    """Fails if ids of another tokenizer or of padding rows are scored like valid tokens."""
    with pytest.raises(NumericsError, match=re.escape(f"[{bad_id}, {bad_id}]")):
        SHARD.check(torch.full((N, K), bad_id))


def test_overwriting_logits_in_use_is_refused() -> None:
    """Fails if another node of the graph that saved the logits reads the gradient that replaced them."""
    logits = _logits().requires_grad_().clone()
    other = logits.square().sum()
    loss = DistillLoss(LossSpec((LossTerm("forward_kl"),)), ("topk",), SHARD, KERNELS, chunk_bytes=1 << 20)
    with pytest.raises(RuntimeError):
        (other + loss.from_logits(logits, topk_targets(*topk_of_mass(0.5)))[0]).backward()


def test_token_mean() -> None:
    """Fails if sums are averaged, or an empty batch divides by zero instead of raising DataError."""
    assert token_mean(6.0, 4) == 1.5
    assert torch.equal(sum_over_group(torch.tensor([1.5, 2.0]), None), torch.tensor([1.5, 2.0], dtype=torch.float64))
    with pytest.raises(DataError):
        token_mean(0.0, 0)
