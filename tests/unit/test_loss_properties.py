"""Test invariances, bounds and limits of the divergences for any student and teacher. Float64, ties included."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gkd.config.loss_spec import DIVERGENCE_NAMES, LossSpec, LossTerm, Tail
from gkd.loss.divergence import DIVERGENCES
from gkd.loss.vocab_parallel import VocabShard
from gkd.types import TokenTargets
from teacher_server.wire.protocol import Signal
from tests.unit.loss_cases import TAILS, distill_loss, topk_targets

# The same examples in every run, so a failure is caused by a change of the code.
examples = settings(max_examples=60, derandomize=True)

TERMS = st.builds(
    LossTerm,
    st.sampled_from(DIVERGENCE_NAMES),
    beta=st.sampled_from([0.1, 0.5, 0.9]),
    alpha=st.sampled_from([0.0, 0.1, 0.7]),
)


class Row(NamedTuple):
    """One token: logits of student and teacher over a vocabulary of v, and the ids that the teacher lists."""

    student: Tensor  # [v]
    teacher: Tensor  # [v]
    ids: Tensor  # [k] distinct


@st.composite
def rows(draw: st.DrawFn, largest: float = 6.0) -> Row:
    v = draw(st.integers(2, 8))
    logit = st.integers(-int(largest * 4), int(largest * 4)).map(lambda quarters: quarters / 4)  # ties are common
    student, teacher = (draw(st.lists(logit, min_size=v, max_size=v)) for _ in range(2))
    ids = draw(st.permutations(range(v)))[: draw(st.integers(1, v))]
    return Row(torch.tensor(student).double(), torch.tensor(teacher).double(), torch.tensor(ids))


def _run(spec: LossSpec, student: Tensor, targets: TokenTargets) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss of the token, its gradient in the logits, and its report, computed as in training."""
    logits = student[None].clone().requires_grad_()
    signal: Signal = "logits" if targets.topk_ids is None else "topk"
    total, sums = distill_loss(spec, signal, shard=VocabShard(0, len(student), None)).from_logits(logits, targets)
    total.backward()
    return total.detach(), logits.grad[0], sums


def _listed(row: Row, ids: Tensor | None = None) -> TokenTargets:
    ids = row.ids if ids is None else ids
    log_p = row.teacher.log_softmax(-1)
    outside = 1 - log_p[ids].exp().sum()
    return topk_targets(ids[None], log_p[ids][None], outside.clamp(min=0)[None])


def _whole(teacher: Tensor) -> TokenTargets:
    one = torch.zeros(1, dtype=torch.int64)
    return TokenTargets(one, torch.zeros(1, dtype=torch.float64), one == 0, logits=teacher[None].clone())


def _same(a: tuple[Tensor, ...], b: tuple[Tensor, ...], atol: float = 1e-10) -> None:
    torch.testing.assert_close(a, b, atol=atol, rtol=1e-8)


@examples
@given(row=rows(), term=TERMS, tail=st.sampled_from(TAILS))
def test_a_list_of_everything_is_the_full_vocabulary(row: Row, term: LossTerm, tail: Tail) -> None:
    """Fails if the top-k and full-vocabulary paths compute different losses, or an empty tail adds to the loss."""
    spec = LossSpec((term,), tail)
    everything = _listed(row, torch.arange(len(row.student)))
    _same(_run(spec, row.student, everything)[:2], _run(spec, row.student, _whole(row.teacher))[:2], atol=1e-9)


@examples
@given(row=rows(), term=TERMS, tail=st.sampled_from(TAILS), shift=st.integers(-40, 40))
def test_a_constant_in_the_logits_changes_nothing(row: Row, term: LossTerm, tail: Tail, shift: int) -> None:
    """Fails if unnormalized logits of student or teacher are used."""
    spec = LossSpec((term,), tail, temperature=0.7)
    _same(_run(spec, row.student, _listed(row)), _run(spec, row.student + shift, _listed(row)))
    _same(_run(spec, row.student, _whole(row.teacher)), _run(spec, row.student - shift, _whole(row.teacher + shift)))


@examples
@given(row=rows(), term=TERMS, tail=st.sampled_from(TAILS), n_padding=st.integers(1, 3))
def test_padding_ids_change_nothing(row: Row, term: LossTerm, tail: Tail, n_padding: int) -> None:
    """Fails if entries past a row's count (-1, -inf) affect the loss, or masses and overlap of the report; with a mass
    target most rows have some.
    """
    padding = torch.full((1, n_padding), -1)
    plain = _listed(row)
    ids = torch.cat([plain.topk_ids, padding], dim=1)
    padded = topk_targets(ids, torch.cat([plain.topk_logprobs, padding * torch.inf], dim=1), plain.tail_mass)
    spec = LossSpec((term,), tail)
    _same(_run(spec, row.student, padded), _run(spec, row.student, plain))


def _is_infinite(term: LossTerm, q: Tensor, p: Tensor) -> bool:
    """Return whether the exact value is infinite: some x log(x / y) has y = 0 and x > 0."""
    plain = term.alpha == 0
    if term.name == "forward_kl" or (term.name == "skew_kl" and plain):
        return bool(((p > 0) & (q == 0)).any())
    if term.name == "reverse_kl" or (term.name == "skew_reverse_kl" and plain):
        return bool(((q > 0) & (p == 0)).any())
    return False


@examples
@given(row=rows(), term=TERMS, tail=st.sampled_from(TAILS), data=st.data())
def test_impossible_tokens(row: Row, term: LossTerm, tail: Tail, data: st.DataObject) -> None:
    """Fails if a probability of 0 makes a nan, or a value that is finite where the exact one is not, or vice versa."""
    v = len(row.student)
    # One listed id stays possible for both: renorm is undefined if no listed id is possible.
    kept = int(row.ids[0])
    for logits in (row.student, row.teacher):
        gone = data.draw(st.sets(st.integers(0, v - 1).filter(lambda i: i != kept)))
        logits[sorted(gone)] = -torch.inf
    p, q = row.teacher.softmax(-1), row.student.softmax(-1)
    for targets, of in ((_whole(row.teacher), slice(None)), (_listed(row), row.ids)):
        value, grad, _ = _run(LossSpec((term,), tail), row.student, targets)
        assert bool(value.isinf()) == _is_infinite(term, q[of], p[of])
        assert not value.isnan()
        if value.isfinite():
            assert grad.isfinite().all()


@pytest.mark.parametrize("name", ["forward_kl", "skew_kl"])
def test_an_impossible_token_has_a_finite_gradient(name: str) -> None:
    """Fails if an infinite forward KL has a nan gradient where the gradient, q - p, is finite; skewed by 0, too."""
    teacher, student = torch.zeros(3).double(), torch.tensor([0.0, -torch.inf, 0.0]).double()
    value, grad, _ = _run(LossSpec((LossTerm(name, alpha=0.0),)), student, _whole(teacher))
    assert float(value) == math.inf
    torch.testing.assert_close(grad, student.softmax(-1) - teacher.softmax(-1))


@pytest.mark.parametrize("name", DIVERGENCE_NAMES)
def test_a_probability_too_small_for_its_dtype_makes_no_nan(name: str) -> None:
    """Fails if 0 * inf enters a loss where the student's probability underflows and the teacher's is 0."""
    log_q = torch.tensor([[0.0, -200.0]], requires_grad=True)
    loss = DIVERGENCES[name](log_q, torch.tensor([[0.0, -torch.inf]]), LossTerm(name)).sum()
    loss.backward()
    assert loss.isfinite() and log_q.grad.isfinite().all()
