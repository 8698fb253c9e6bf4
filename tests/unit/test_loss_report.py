"""Test the diagnostics: each number of each token equals its definition, and sums follow the order of names."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gkd.actor.common.step import BatchSums, diagnostics
from gkd.config.loss_spec import LossSpec, LossTerm
from gkd.loss.choices import N_CHOICES
from gkd.loss.distill_loss import DistillLoss
from gkd.loss.row_kernels import TorchRows
from gkd.loss.token_loss import topk_losses
from gkd.loss.vocab_parallel import VocabShard
from gkd.types import TokenTargets
from teacher_server.wire.protocol import Signal
from tests.unit.loss_cases import Batch, K, N, V, topk_targets, written_out

MIXTURE = (LossTerm("reverse_kl"), LossTerm("k2", 0.5), LossTerm("sft", 0.25))


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("temperature", [0.7, 2.0])
@pytest.mark.parametrize("signal", ["topk", "logits", "hidden"])
def test_numbers_of_every_token(signal: Signal, temperature: float, fused: bool) -> None:
    """Fails if a diagnostic differs from its definition, or token rows arrive in another order."""
    spec, batch = LossSpec(MIXTURE, temperature=temperature, importance_clip=1.0), Batch()
    values, _ = written_out(spec, batch, signal, batch.hidden @ batch.head.T)
    loss = batch.loss(spec, signal, 3)
    tables: list[Tensor] = []
    loss.on_rows = tables.append
    targets = batch.targets(signal, temperature)
    if fused:
        _, sums = loss.from_hidden(batch.hidden, batch.head, targets)
    else:
        _, sums = loss.from_logits(batch.hidden @ batch.head.T, targets)
    table = torch.cat(tables)
    assert set(loss.report_names) == set(values) and len(set(loss.report_names)) == len(loss.report_names)
    assert table.shape == (N, len(loss.report_names))
    for column, name in zip(table.T, loss.report_names, strict=True):
        torch.testing.assert_close(column, values[name], msg=f"{name}: {column} is not {values[name]}")
    torch.testing.assert_close(sums, table.sum(dim=0))
    assert 0 < int(values["importance_clipped"].sum()) < N  # the case has both kinds


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("signal", ["topk", "logits", "hidden", "sampled"])
def test_the_teachers_choices_of_every_token(signal: Signal, fused: bool) -> None:
    """Fails if the report shows other tokens than the teacher's most probable ones, or wrong probabilities."""
    temperature, batch = 0.7, Batch()
    terms = (LossTerm("k1"),) if signal == "sampled" else (LossTerm("jsd"),)
    loss = batch.loss(LossSpec(terms, temperature=temperature), signal, 3)
    logits, found = batch.hidden @ batch.head.T, list[Tensor]()
    with torch.no_grad(), loss.evaluating(None, found.append):
        if fused:
            loss.from_hidden(batch.hidden, batch.head, batch.targets(signal, temperature))
        else:
            loss.from_logits(logits.clone(), batch.targets(signal, temperature))
    assert loss.on_choices is None
    if signal == "sampled":
        assert not found, "without a distribution there are no choices"
        return
    p, ids = batch.teacher_logprobs(temperature).exp().topk(min(N_CHOICES, K if signal == "topk" else V))
    q = (logits[:, :V] / temperature).softmax(dim=-1).gather(1, ids)
    torch.testing.assert_close(torch.cat(found), torch.stack([ids.double(), p, q], dim=2))


def test_the_teachers_probability_of_the_end_tokens_from_a_list() -> None:
    """Fails if an end token is looked up in another row, or one that the list lacks counts as likely."""
    ids = torch.tensor([[2, 5, -1], [1, 4, -1], [7, 1, 3], [1, 2, 3]])
    log_p = torch.tensor([[0.5, 0.2, 0.0], [0.9, 0.05, 0.0], [0.6, 0.3, 0.1], [0.8, 0.1, 0.1]]).log()
    targets = topk_targets(ids, log_p, torch.tensor([0.3, 0.05, 0.0, 0.0]))
    targets.sampled_ids = torch.tensor([2, 1, 9, 1])
    targets.ends = torch.tensor([False, True, True, False])
    values = topk_losses(LossSpec(), targets, log_p, torch.zeros(4), torch.zeros(4)).values
    torch.testing.assert_close(values["teacher_end_probability"], torch.tensor([0.0, 0.9, 0.0, 0.0]))
    assert values["ended"].tolist() == [0, 1, 1, 0]


def test_means_of_end_tokens_are_over_end_tokens() -> None:
    """Fails if the mean is over all tokens, or a batch without an end divides by zero."""
    loss = Batch().loss(LossSpec(), "topk")
    sums = dict.fromkeys(loss.report_names, 6.0)
    found = diagnostics(loss, BatchSums(12, 8, sums | {"ended": 4.0, "teacher_end_probability": 3.0}))
    assert found["loss/teacher_end_probability"] == 0.75 and "loss/ended" not in found
    assert found["loss/engine_kl"] == 0.75
    assert "loss/teacher_end_probability" not in diagnostics(loss, BatchSums(12, 8, sums | {"ended": 0.0}))


@pytest.mark.parametrize("signal", ["topk", "logits"])
def test_the_entropy_of_large_logits(signal: Signal) -> None:
    """Fails if the entropy is computed from two large numbers, whose rounding hides a small value (3e-4)."""
    v, k = 1000, 64
    logits = torch.full((4, v), 88.0) + torch.randn((4, v), generator=torch.Generator().manual_seed(0))
    logits[:, 3] = 103.0
    log_q = logits.double().log_softmax(-1)
    targets = TokenTargets(torch.full((4,), 3), torch.zeros(4), torch.ones(4, dtype=torch.bool))
    if signal == "topk":
        targets.topk_logprobs, targets.topk_ids = log_q.topk(k)
        targets.tail_mass = 1 - targets.topk_logprobs.exp().sum(-1)
    else:
        targets.logits = log_q
    rows: list[Tensor] = []
    loss = DistillLoss(LossSpec(), (signal,), VocabShard(0, v, None), TorchRows(), 1 << 20, on_rows=rows.append)
    loss.from_logits(logits, targets)
    entropy = torch.cat(rows)[:, loss.report_names.index("student_entropy")]
    # float32 represents a logit near 100 to 4e-6, and each mean of them, too.
    torch.testing.assert_close(entropy.double(), -(log_q.exp() * log_q).sum(-1), atol=6e-5, rtol=0.0)
