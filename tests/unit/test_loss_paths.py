"""Compare every loss on every code path (signal, fused head or logits, chunks) with the loss in probabilities."""

from __future__ import annotations

import pytest
import torch

from gkd.config.loss_spec import DIVERGENCE_NAMES, LossSpec, LossTerm, Tail
from gkd.config.schema_teacher import LOSS_NAMES
from teacher_server.wire.protocol import Signal
from tests.unit.loss_cases import OWN, TAILS, Batch, N, V, train, written_out

MIXTURE = (
    LossTerm("jsd", 1.5, beta=0.1),
    LossTerm("skew_kl", 0.25, alpha=0.3),
    LossTerm(OWN, 0.5, alpha=0.4),
    LossTerm("k3", 0.5),
    LossTerm("k1", 0.125),
    LossTerm("sft", 0.75),
)
SIGNALS: tuple[Signal, ...] = ("topk", "logits", "hidden", "sampled")
CASES = [
    *(((LossTerm(name, 2.0, beta=0.3, alpha=0.2),), signal) for name in (*LOSS_NAMES, OWN) for signal in SIGNALS[:3]),
    *(((LossTerm(name, 2.0),), "sampled") for name in ("k1", "k2", "k3", "sft")),
    *((MIXTURE, signal) for signal in SIGNALS[:3]),
]


def _name(value: object) -> str:
    return "+".join(term.name for term in value) if isinstance(value, tuple) else str(value)


@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.0])
@pytest.mark.parametrize(("terms", "signal"), CASES, ids=_name)
def test_every_path_equals_the_written_out_loss(
    terms: tuple[LossTerm, ...], signal: Signal, temperature: float
) -> None:
    """Fails if a path, a chunk boundary, a padded column or the temperature changes a loss, a report or a gradient."""
    spec, batch = LossSpec(terms, temperature=temperature), Batch()
    hidden, head = batch.hidden.clone().requires_grad_(), batch.head.clone().requires_grad_()
    values, scalar = written_out(spec, batch, signal, hidden @ head.T)
    (scalar * 0.3).backward()
    for fused, chunk_rows in ((True, 1), (True, 3), (True, N), (True, 100), (False, 3), (False, 100)):
        loss = batch.loss(spec, signal, chunk_rows)
        total, sums, *grads = train(loss, batch, batch.targets(signal, temperature), fused=fused, scale=0.3)
        torch.testing.assert_close(total, values["total"].sum())
        torch.testing.assert_close(sums, torch.stack([values[name].sum() for name in loss.report_names]))
        torch.testing.assert_close(grads, [hidden.grad, head.grad])
        assert not grads[1][V:].any()


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("signal", SIGNALS)
def test_clipped_tokens_are_constants(signal: Signal, fused: bool) -> None:
    """Fails if distill.token_clip changes a token below it, or one above it has another value or a gradient."""
    terms = MIXTURE if signal != "sampled" else MIXTURE[3:]
    clip = 0.8 if signal == "sampled" else 2.0
    spec, batch = LossSpec(terms, temperature=0.7, token_clip=clip), Batch()
    hidden, head = batch.hidden.clone().requires_grad_(), batch.head.clone().requires_grad_()
    values, scalar = written_out(spec, batch, signal, hidden @ head.T)
    scalar.backward()
    assert 0 < values["token_clipped"].sum() < N
    loss = batch.loss(spec, signal, 3)
    total, sums, *grads = train(loss, batch, batch.targets(signal, 0.7), fused=fused)
    torch.testing.assert_close(total, values["total"].sum())
    torch.testing.assert_close(sums, torch.stack([values[name].sum() for name in loss.report_names]))
    torch.testing.assert_close(grads, [hidden.grad, head.grad])


@pytest.mark.parametrize("signal", SIGNALS[:2])
def test_a_clipped_infinity_has_no_gradient(signal: Signal) -> None:
    """Fails if a token to which the teacher gives probability 0 makes the gradient of a clipped reverse KL nan."""
    batch = Batch()
    targets = batch.targets(signal, 1.0)
    table = targets.topk_logprobs if targets.logits is None else targets.logits
    table[0, 0] = -torch.inf
    loss = batch.loss(LossSpec((LossTerm("reverse_kl"),), token_clip=1.5), signal, 3)
    total, _, *grads = train(loss, batch, targets, fused=True)
    assert total.isfinite() and all(grad.isfinite().all() for grad in grads)
    assert not grads[0][0].any() and grads[0][1:].any()


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("name", (*DIVERGENCE_NAMES, OWN))
def test_tails_on_every_path(name: str, tail: Tail) -> None:
    """Fails if value or gradient of the fused head, or of the path from logits, ignore the tail policy."""
    for temperature, chunk_rows in ((0.7, 1), (1.0, 3), (2.0, 100)):
        spec, batch = LossSpec((LossTerm(name, beta=0.3, alpha=0.2),), tail, temperature), Batch()
        hidden, head = batch.hidden.clone().requires_grad_(), batch.head.clone().requires_grad_()
        values, scalar = written_out(spec, batch, "topk", hidden @ head.T)
        (scalar * 0.3).backward()
        for fused in (True, False):
            loss, targets = batch.loss(spec, "topk", chunk_rows), batch.targets("topk", temperature)
            total, _, *grads = train(loss, batch, targets, fused=fused, scale=0.3)
            torch.testing.assert_close(total, values["total"].sum())
            torch.testing.assert_close(grads, [hidden.grad, head.grad])


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("signal", ["topk", "logits", "sampled"])
def test_infinities_on_skipped_rows_make_no_nan(signal: Signal, fused: bool) -> None:
    """Fails if an infinity on a token that a term is not defined for makes its gradient nan.

    The teacher may give a dataset token probability 0; k3 is defined only for the student's own tokens.
    """
    batch = Batch()
    targets = batch.targets(signal, 1.0)
    if targets.logits is not None:
        targets.logits.scatter_(1, batch.sampled_ids[:, None], -torch.inf)
    elif targets.sampled_logprobs is not None:
        targets.sampled_logprobs.fill_(-torch.inf)
    targets.on_policy = torch.zeros(N, dtype=torch.bool)
    both = train(batch.loss(LossSpec((LossTerm("k3"), LossTerm("sft"))), signal, 3), batch, targets, fused=fused)
    sft = train(batch.loss(LossSpec((LossTerm("sft"),)), signal, 3), batch, targets, fused=fused)
    torch.testing.assert_close(both[2:], sft[2:])


def test_padded_columns_are_ignored() -> None:
    """Fails if padding rows of the head, here infinite, leak into loss or gradient."""
    for signal in SIGNALS[:3]:
        batch = Batch()
        loss = batch.loss(LossSpec(MIXTURE), signal, 3)
        targets = batch.targets(signal, 1.0)
        expected = train(loss, batch, targets, fused=True)
        batch.head[V:] = torch.inf
        torch.testing.assert_close(train(loss, batch, targets, fused=True), expected)
        hidden, head = batch.hidden.clone(), batch.head.clone()
        logits = torch.nan_to_num(hidden @ head.T, nan=3e38, posinf=3e38, neginf=3e38).requires_grad_()
        total, sums = loss.from_logits(logits, targets)
        total.backward()
        torch.testing.assert_close([total.detach(), sums], expected[:2])
        assert logits.grad is not None and not logits.grad[:, V:].any() and logits.grad[:, :V].isfinite().all()
