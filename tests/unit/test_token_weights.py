"""Test distill.token_weight and distill.token_share: factors compared with their formulas, on all paths of the loss."""

from __future__ import annotations

import dataclasses
from itertools import product

import pytest
import torch
from torch import Tensor

from gkd.actor.common.step import BatchSums, diagnostics
from gkd.config.loss_spec import LossSpec, LossTerm, teacher_signals
from gkd.config.schema_teacher import TOKEN_WEIGHTS
from gkd.data.columns import ALL_COLUMNS
from gkd.errors import DataError
from gkd.loss import token_weights
from gkd.loss.distill_loss import DistillLoss
from gkd.loss.token_weights import with_token_weights
from gkd.types import TokenTargets
from teacher_server.wire.protocol import Signal
from tests.dist import dense_loss
from tests.dist.dense_loss import dense_factors
from tests.unit.loss_cases import KERNELS, SHARD, Batch, D, H, V, normal, train, written_out

N_SUPPORT = 4  # of V tokens; a run has 16
WEIGHTS = TOKEN_WEIGHTS[1:]
LENGTHS = (9, 1, 6, 4)
ROWS = sum(LENGTHS)
SEQUENCES = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
TERMS = (LossTerm("reverse_kl"), LossTerm("k2", 0.5), LossTerm("sft", 0.25))
OF_SEQUENCE = torch.tensor([0.5, 2.0, 1.0, 0.25])[SEQUENCES]  # of distill.normalize


@pytest.fixture(autouse=True)
def few_probable_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the student's most probable tokens be few of the small vocabulary."""
    for module in (token_weights, dense_loss):
        monkeypatch.setattr(module, "N_SUPPORT", N_SUPPORT)


def big_batch() -> Batch:
    """Return `ROWS` rows; the third sequence is from the dataset."""
    return Batch(
        hidden=normal(ROWS, H, seed=1),
        teacher_hidden=normal(ROWS, D, seed=3),
        sampled_ids=torch.arange(ROWS) * 7 % V,
        rollout_logprobs=normal(ROWS, seed=5) / 2 - 3.0,
        on_policy=SEQUENCES != 2,
        ends=torch.zeros(ROWS, dtype=torch.bool),
    )


def case(spec: LossSpec, signal: Signal) -> tuple[Batch, TokenTargets, Tensor]:
    """Return a batch, its targets, and its factors from the formulas."""
    batch = big_batch()
    targets = dataclasses.replace(batch.targets(signal, spec.temperature), sequences=SEQUENCES)
    log_p = batch.teacher_logprobs(spec.temperature) if signal in ("logits", "hidden") else None
    return batch, targets, dense_factors(spec, targets, (batch.hidden @ batch.head.T)[:, :V], log_p)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("share", [1.0, 0.35])
@pytest.mark.parametrize(
    ("weight", "signal"),
    [x for x in product(WEIGHTS, ("topk", "logits", "hidden", "sampled")) if "teach" not in x[0] or x[1] != "sampled"],
)
def test_factors_of_the_formulas_multiply_the_loss(weight: str, signal: Signal, share: float, fused: bool) -> None:
    """Fails if a factor differs from its formula, is lost on a path, has a gradient, or ignores distill.normalize."""
    terms = TERMS[1:] if signal == "sampled" else TERMS
    spec = LossSpec(terms, temperature=0.7, token_weight=weight, token_share=share)
    batch, targets, factors = case(spec, signal)
    assert len(set(factors.tolist())) > 4, "the case has different factors"
    for length, part in zip(LENGTHS, factors.split(LENGTHS), strict=True):
        assert (
            float(part.sum()) == pytest.approx(length) and int((part > 0).sum()) <= -(-length * 35 // 100) or share == 1
        )
    logits = (batch.hidden @ batch.head.T).requires_grad_()
    values, scalar = written_out(spec, batch, signal, logits)
    (slopes,) = torch.autograd.grad(scalar, logits)
    for outer in (None, OF_SEQUENCE):
        whole = factors if outer is None else factors * outer
        for chunk_rows in (3, 100):
            found = train(
                batch.loss(spec, signal, chunk_rows), batch, dataclasses.replace(targets, weights=outer), fused=fused
            )
            torch.testing.assert_close(found[0], (whole * values["total"]).sum(), rtol=1e-6, atol=1e-7)
            want = whole[:, None] * slopes
            torch.testing.assert_close(found[2:], [want @ batch.head, want.T @ batch.hidden], rtol=1e-6, atol=1e-6)
    loss = batch.loss(spec, signal)
    sums = dict(zip(loss.report_names, found[1].tolist(), strict=True))
    size = values["total"].abs()
    assert sums["k2"] == pytest.approx(float(values["k2"].sum())), "the terms are reported without factors"
    numbers = diagnostics(loss, BatchSums(ROWS, int(batch.on_policy.sum()), sums))
    assert numbers["loss/kept_share"] == pytest.approx(float(size[factors > 0].sum() / size.sum()))
    assert "loss/kept_size" not in numbers and "loss/loss_size" not in numbers


def test_factors_of_known_sequences() -> None:
    """Fails if a formula or the number of kept tokens changes."""
    sequences = torch.tensor([0, 0, 0, 0, 1])

    def factors(weight: str, share: float, **values: list[float]) -> list[float]:
        targets = TokenTargets(sequences, torch.zeros(5), torch.ones(5, dtype=torch.bool), sequences=sequences)
        tables = {name: torch.tensor(column, dtype=torch.float32) for name, column in values.items()}
        weights = with_token_weights(
            targets, LossSpec(token_weight=weight, token_share=share), tables, ALL_COLUMNS
        ).weights
        assert weights.dtype == torch.float32
        return weights.tolist()

    assert factors("entropy", 1.0, student_entropy=[1, 0, 2, 1, 7]) == [1, 0, 2, 1, 1]
    assert factors("entropy", 0.5, student_entropy=[1, 0, 3, 1, 7]) == [1, 0, 3, 0, 1]  # of two equal ones the first
    assert factors("entropy", 0.51, student_entropy=[1, 0, 2, 1, 7]) == [1, 0, 2, 1, 1]  # 2.04 tokens are 3
    assert factors("entropy", 0.5, student_entropy=[0, 0, 0, 0, 0]) == [2, 2, 0, 0, 1]
    # Discrepancies before each token: 0, 1, 3, 4 of 4.
    position = factors("position", 1.0, sampled_reverse_kl=[1, -2, 1, 9, 0])
    assert position == pytest.approx([1.5 * 4 / 5, 1.375 * 4 / 5, 1.125 * 4 / 5, 0.8, 1])
    assert factors("position", 0.25, sampled_reverse_kl=[1, -2, 1, 9, 0]) == [4, 0, 0, 0, 1]
    # The quantiles of the first sequence: 5% is 0.15 of 0, 1, 2, 3, and 95% is 2.85.
    kls, masses = [0.0, 1.0, 2.0, 3.0, 5.0], [0.5, 0.5, 0.5, 0.5, 0.1]
    raw = [0, 0.85 / 2.7, 1.85 / 2.7, 1]
    expected = [4 * each / sum(raw) for each in raw] + [1]
    assert factors("teachability", 1.0, token_kl=kls, support_mass=masses) == pytest.approx(expected)


class _Counted(DistillLoss):
    passes = 0

    def chunk(self, logits: Tensor, targets: TokenTargets, rows: slice, *, with_grad: bool) -> Tensor:
        type(self).passes += 1
        return super().chunk(logits, targets, rows, with_grad=with_grad)


def test_without_token_weights_nothing_is_computed_twice() -> None:
    """Fails if the default costs a second product with the LM head, or evaluations are weighed."""
    for spec, expected in ((LossSpec(TERMS), 1), (LossSpec(TERMS, token_weight="entropy"), 2)):
        batch, targets, _ = case(LossSpec(TERMS, token_weight="entropy"), "topk")
        loss = _Counted(spec, ("topk", "sampled"), SHARD, KERNELS, 1 << 20)
        _Counted.passes = 0
        trained = train(loss, batch, targets, fused=True)
        assert _Counted.passes == expected
        with torch.no_grad(), loss.evaluating(None):
            evaluated = loss.from_hidden(batch.hidden, batch.head, targets)
        plain = train(
            batch.loss(LossSpec(TERMS), "topk"), batch, dataclasses.replace(targets, sequences=None), fused=True
        )
        assert torch.equal(evaluated[0], plain[0]) and torch.equal(trained[0], plain[0]) == (expected == 1)


def test_rows_without_sequences_are_refused() -> None:
    """Fails if rows of unknown sequences are weighed as one."""
    batch = big_batch()
    loss = batch.loss(LossSpec(token_weight="entropy"), "topk")
    with pytest.raises(DataError):
        loss.from_hidden(batch.hidden, batch.head, batch.targets("topk", 1.0))


def test_position_requests_the_sampled_token() -> None:
    """Fails if the teacher's list, which may lack the sampled token, is all that `position` gets."""
    for weight, expected in (("none", ("topk",)), ("entropy", ("topk",)), ("position", ("topk", "sampled"))):
        assert teacher_signals(LossSpec(token_weight=weight), "topk") == expected
    assert teacher_signals(LossSpec(token_weight="position"), "hidden") == ("hidden",)
    assert teacher_signals(LossSpec((LossTerm("k1"),), token_weight="position"), "topk") == ("sampled",)
