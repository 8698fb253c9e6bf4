"""Compare every loss on every code path (signal, fused head or logits, chunks) with the loss in probabilities."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gkd.config.loss_spec import DIVERGENCE_NAMES, POLICY_GRADIENT_NAMES, LossSpec, LossTerm
from gkd.config.schema_teacher import LOSS_NAMES, SFT
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
ONE = {name: (LossTerm(name, 2.0, beta=0.3, alpha=0.2),) for name in (*LOSS_NAMES, OWN)}
CASES = [
    *((LossSpec(terms), signal) for terms in ONE.values() for signal in SIGNALS[:3]),
    *((LossSpec(ONE[name]), "sampled") for name in (*POLICY_GRADIENT_NAMES, SFT)),
    *((LossSpec(ONE[name], tail), "topk") for name in (*DIVERGENCE_NAMES, OWN) for tail in TAILS if tail != "bucket"),
    *((LossSpec(MIXTURE, token_clip=clip), signal) for clip in (0.0, 2.0) for signal in SIGNALS[:3]),
    (LossSpec(MIXTURE[3:], token_clip=0.8), "sampled"),
]


def _name(value: LossSpec | str) -> str:
    if isinstance(value, str):
        return value
    return f"{'+'.join(term.name for term in value.terms)}-{value.tail}-{value.token_clip}"


@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.0])
@pytest.mark.parametrize(("spec", "signal"), CASES, ids=_name)
def test_every_path_equals_the_written_out_loss(spec: LossSpec, signal: Signal, temperature: float) -> None:
    """Fails if a path, a chunk boundary, a padded column, the tail policy or the temperature changes a loss, a report
    or a gradient; if distill.token_clip changes a token below it, or one above it has another value or a gradient.
    """
    spec, batch = replace(spec, temperature=temperature), Batch()
    hidden, head = batch.hidden.clone().requires_grad_(), batch.head.clone().requires_grad_()
    values, scalar = written_out(spec, batch, signal, hidden @ head.T)
    if spec.token_clip and temperature == 0.7:
        assert 0 < values["token_clipped"].sum() < N, "the case has both kinds"
    (scalar * 0.3).backward()
    for fused, chunk_rows in ((True, 1), (True, 3), (True, N), (True, 100), (False, 3), (False, 100)):
        loss = batch.loss(spec, signal, chunk_rows)
        total, sums, *grads = train(loss, batch, batch.targets(signal, temperature), fused=fused, scale=0.3)
        torch.testing.assert_close(total, values["total"].sum())
        torch.testing.assert_close(sums, torch.stack([values[name].sum() for name in loss.report_names]))
        torch.testing.assert_close(grads, [hidden.grad, head.grad])
        assert not grads[1][V:].any()


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
