"""Test the loss at training precision: bfloat16 logits, teacher tables in the fp16 wire format, 32000 tokens.

Logits like a language model's: a Zipf slope with Gumbel noise, so a few tokens hold most of the mass, and a student
close to its teacher.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gkd.config.loss_spec import DIVERGENCE_NAMES, LossSpec, LossTerm, Tail
from gkd.config.schema_teacher import LOSS_NAMES
from gkd.loss.distill_loss import DistillLoss
from gkd.loss.divergence import DIVERGENCES
from gkd.loss.row_kernels import TorchRows
from gkd.loss.vocab_parallel import VocabShard
from gkd.types import TokenTargets
from teacher_server.wire.protocol import Signal
from tests.unit.loss_cases import TAILS

N, V, K = 16, 32000, 64


def _language_model() -> tuple[Tensor, Tensor]:
    """Return [N, V] float64 logits of the teacher and of the student."""
    generator = torch.Generator().manual_seed(0)
    uniform = torch.rand((N, V), generator=generator, dtype=torch.float64).clamp(min=1e-12)
    slope = -1.5 * torch.arange(1, V + 1, dtype=torch.float64).log()
    order = torch.stack([torch.randperm(V, generator=generator) for _ in range(N)])
    teacher = (slope[order] - (-uniform.log()).log()) * 1.5 + 12.0
    noise = torch.randn((N, V), generator=generator, dtype=torch.float64)
    return teacher, teacher + 0.3 * noise


TEACHER, STUDENT = _language_model()


def _targets(signal: Signal, wire: Callable[[Tensor], Tensor] = lambda t: t) -> TokenTargets:
    """Return targets made from TEACHER; `wire` is the rounding of the transport, per floating-point table."""
    log_p = TEACHER.log_softmax(-1)
    sampled = log_p.topk(3).indices[:, 1]
    rollout = STUDENT.log_softmax(-1).gather(1, sampled[:, None])[:, 0] + 0.01
    targets = TokenTargets(sampled, rollout, torch.arange(N) % 2 == 0)
    if signal == "topk":
        values, targets.topk_ids = log_p.topk(K)
        targets.topk_logprobs, targets.tail_mass = wire(values), 1 - values.exp().sum(-1)
        targets.sampled_logprobs = wire(log_p.gather(1, sampled[:, None])[:, 0])
    else:
        targets.logits = wire(log_p)
    return targets


def _losses(spec: LossSpec, signal: Signal, logits: Tensor, targets: TokenTargets) -> tuple[Tensor, Tensor]:
    """Return the [N] losses of tokens, and their gradients [N, V]."""
    rows: list[Tensor] = []
    loss = DistillLoss(spec, (signal, "sampled"), VocabShard(0, V, None), TorchRows(), 1 << 20, on_rows=rows.append)
    leaf = logits.clone().requires_grad_()
    loss.from_logits(leaf, targets)[0].backward()
    return torch.cat(rows)[:, 0].double(), leaf.grad.double()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("signal", ["topk", "logits"])
@pytest.mark.parametrize("name", LOSS_NAMES)
def test_bfloat16_logits(name: str, signal: Signal, temperature: float) -> None:
    """Fails if sums over the vocabulary are not computed in float32: with 32000 tokens bfloat16 is far off."""
    spec = LossSpec((LossTerm(name),), temperature=temperature)
    logits = STUDENT.bfloat16()
    targets = _targets(signal)
    got, grad = _losses(spec, signal, logits, targets)
    expected, expected_grad = _losses(spec, signal, logits.double(), targets)
    torch.testing.assert_close(got, expected, atol=1e-3, rtol=0.0)
    torch.testing.assert_close(grad, expected_grad, atol=1e-3, rtol=1e-2)  # a bfloat16 has 8 bits
    plain, _ = _losses(spec, signal, STUDENT, targets)
    assert abs(float((got - plain).mean())) < 2e-2  # the effect of rounding the logits themselves


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("name", DIVERGENCE_NAMES)
def test_teacher_through_the_fp16_wire(name: str, tail: Tail) -> None:
    """Fails if rounding the teacher's table to fp16, the default of the wire, moves the loss by more than 1e-3."""
    spec = LossSpec((LossTerm(name),), tail)
    exact, _ = _losses(spec, "topk", STUDENT.float(), _targets("topk"))
    rounded, _ = _losses(spec, "topk", STUDENT.float(), _targets("topk", lambda t: t.half().float()))
    assert float((exact - rounded).abs().max()) < 1e-3
    assert float((exact - rounded).abs().max()) > 0
    if tail != "drop":
        assert float(rounded.min()) >= -1e-6


@pytest.mark.parametrize("name", DIVERGENCE_NAMES)
def test_wire_rounding_does_not_make_a_loss_negative(name: str) -> None:
    """Fails if the rounded list and its tail are used although they do not sum to 1.

    A student that equals its teacher would then get a negative loss.
    """
    targets = _targets("topk", lambda t: t.half().float())
    sums = targets.topk_logprobs.double().exp().sum(dim=-1) + targets.tail_mass
    assert float((sums - 1).min()) < -1e-5  # the rounding is visible
    losses, _ = _losses(LossSpec((LossTerm(name),)), "topk", TEACHER.float(), targets)
    assert float(losses.min()) >= -1e-6 and float(losses.max()) < 1e-5


@pytest.mark.parametrize("name", DIVERGENCE_NAMES)
@pytest.mark.parametrize("outside", [1e-4, 1e-6, 1e-8, 1e-12])
def test_a_confident_student_gets_the_gradient_of_the_tail(name: str, outside: float) -> None:
    """Fails if the student's mass outside the list is computed as 1 - sum, which cancels completely in float32.

    The gradient towards a teacher with mass elsewhere would be wrong by a fifth, or zero.
    """
    v, k = 50, 4
    logits = torch.zeros(1, v, dtype=torch.float64)
    logits[0, :k] = torch.tensor([3.0, 2.0, 1.0, 0.5]) + torch.tensor((v - k) / outside).log()
    p = torch.tensor([[0.5, 0.2, 0.15, 0.05]], dtype=torch.float64)
    targets = TokenTargets(torch.tensor([7]), torch.zeros(1), torch.ones(1, dtype=torch.bool))
    targets.topk_ids, targets.topk_logprobs, targets.tail_mass = torch.arange(k)[None], p.log(), 1 - p.sum(-1)
    loss = DistillLoss(LossSpec((LossTerm(name),)), ("topk",), VocabShard(0, v, None), TorchRows(), 1 << 20)

    dense = logits.clone().requires_grad_()
    log_q = dense.log_softmax(-1)
    q_tables = torch.cat([log_q[:, :k], log_q[:, k:].logsumexp(-1, keepdim=True)], dim=-1)
    p_tables = torch.cat([p, 1 - p.sum(-1, keepdim=True)], dim=-1).log()
    expected = DIVERGENCES[name](q_tables, p_tables, LossTerm(name)).sum()
    expected.backward()

    single = logits.float().requires_grad_()
    got, _ = loss.from_logits(single * 1.0, targets)
    got.backward()
    torch.testing.assert_close(got.detach().double(), expected.detach(), rtol=2e-6, atol=1e-6)
    torch.testing.assert_close(single.grad.double(), dense.grad, rtol=2e-5, atol=2e-6)
    assert float(single.grad.sum().abs()) < 5e-6, "a softmax's gradient sums to zero"


def test_the_statistics_of_a_long_row() -> None:
    """Fails if the error of torch's softmax over 152k columns, whose weights sum to 1 + 6e-6, is in the mean logit."""
    logits = torch.randn((4, 151936), generator=torch.Generator().manual_seed(0)) * 3
    log_sum, mean = TorchRows().statistics(logits, 1.0)
    exact = logits.double()
    torch.testing.assert_close(log_sum.double(), exact.logsumexp(-1), rtol=0.0, atol=4e-6)
    torch.testing.assert_close(mean.double(), (exact.softmax(-1) * exact).sum(-1), rtol=0.0, atol=1e-5)
