"""The loss of several teachers: weights and temperatures by row, sums by route, compared with float64 written out."""

from __future__ import annotations

import dataclasses
from dataclasses import replace

import numpy as np
import pytest
import torch

from gkd.actor.common.step import BatchSums, diagnostics
from gkd.config.loss_spec import LossSpec, LossTerm
from gkd.config.schema import Route
from gkd.config.schema_teacher import NORMALIZATIONS, TeacherConfig
from gkd.data.batching import make_micro_batches
from gkd.data.collate import route_counts, sequence_weights, size_numbers, without_targets
from gkd.errors import DataError
from gkd.types import Rollout, TeacherScores
from teacher_server.wire.protocol import Signal
from tests.unit.loss_cases import Batch, train, written_out

TERMS = (LossTerm("reverse_kl"), LossTerm("k2", 0.5), LossTerm("sft", 0.25))
DOMAINS = ("code", "law", "math")  # no row is of law
ROUTES = torch.tensor([0, 2, 2, 0, 2, 0, 2])
WEIGHTS = torch.tensor([0.5, 2.0, 2.0, 0.5, 2.0, 0.5, 0.25])


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("signal", ["topk", "logits", "hidden", "sampled"])
def test_weights_multiply_the_loss_of_their_rows(signal: Signal, fused: bool) -> None:
    """Fails if a weight is lost on a path, multiplies another row, or changes a term's own mean."""
    batch, spec = Batch(), LossSpec(TERMS[1:] if signal == "sampled" else TERMS, domains=DOMAINS)
    logits = (batch.hidden @ batch.head.T).requires_grad_()
    values, scalar = written_out(spec, batch, signal, logits)
    (slopes,) = torch.autograd.grad(scalar, logits)
    slopes = WEIGHTS[:, None] * slopes
    targets = dataclasses.replace(batch.targets(signal, 1.0), routes=ROUTES, weights=WEIGHTS)
    loss = batch.loss(spec, signal, 3)
    total, sums, *grads = train(loss, batch, targets, fused=fused)
    torch.testing.assert_close(total, (WEIGHTS * values["total"]).sum())
    torch.testing.assert_close(grads, [slopes @ batch.head, slopes.T @ batch.hidden])
    found = dict(zip(loss.report_names, sums.tolist(), strict=True))
    assert found["k2"] == pytest.approx(float(values["k2"].sum()))
    for i, domain in enumerate(DOMAINS):
        own = i == ROUTES
        assert found[f"domain/{domain}/tokens"] == int(own.sum())
        assert found[f"domain/{domain}/total"] == pytest.approx(float((WEIGHTS * values["total"])[own].sum()))
        kl = 0.0 if signal == "sampled" else float(values["token_kl"][own].sum())
        assert found[f"domain/{domain}/token_kl"] == pytest.approx(kl)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("signal", ["topk", "logits", "sampled"])
def test_each_row_has_the_temperature_of_its_route(signal: Signal, fused: bool) -> None:
    """Fails if a route's temperature divides the teacher's logits alone, or the rows of another route."""
    batch, own = Batch(), (0.7, 1.0, 2.0)
    terms = TERMS[1:] if signal == "sampled" else TERMS
    targets = dataclasses.replace(batch.targets(signal, 1.0), routes=ROUTES)
    expected_total, slopes = torch.zeros((), dtype=torch.float64), torch.zeros(())
    logits = (batch.hidden @ batch.head.T).requires_grad_()
    for i, temperature in enumerate(own):
        rows = i == ROUTES
        at = batch.targets(signal, temperature)
        for name in ("topk_ids", "topk_logprobs", "tail_mass", "sampled_logprobs", "logits"):
            if (table := getattr(at, name)) is not None:
                mixed = getattr(targets, name).clone()
                mixed[rows] = table[rows]
                targets = dataclasses.replace(targets, **{name: mixed})
        values, scalar = written_out(LossSpec(terms, temperature=temperature), batch, signal, logits)
        expected_total = expected_total + values["total"][rows].sum()
        slopes = slopes + torch.autograd.grad(scalar, logits)[0] * rows[:, None]
    for base in (1.0, 0.7):  # teacher.temperature, which the routes override
        spec = LossSpec(terms, temperature=base, domains=DOMAINS, temperatures=own)
        total, _, *grads = train(batch.loss(spec, signal, 3), batch, targets, fused=fused)
        torch.testing.assert_close(total, expected_total)
        torch.testing.assert_close(grads, [slopes @ batch.head, slopes.T @ batch.hidden])


def test_tokens_without_a_route_are_refused() -> None:
    """Fails if rows without routes are counted for the first one."""
    batch = Batch()
    with pytest.raises(DataError):
        batch.loss(LossSpec(domains=DOMAINS), "topk").from_hidden(batch.hidden, batch.head, batch.targets("topk", 1.0))


def test_numbers_of_the_domains() -> None:
    """Fails if a number of a domain is divided by the tokens of all, or a domain without tokens divides by zero."""
    loss = Batch().loss(LossSpec(domains=DOMAINS), "topk")
    sums = dict.fromkeys(loss.report_names, 6.0) | {"total": 8.0, "domain/math/tokens": 4.0, "domain/math/total": 6.0}
    sums |= {"domain/law/tokens": 0.0, "domain/law/total": 0.0, "domain/law/token_kl": 0.0}
    found = {k: v for k, v in diagnostics(loss, BatchSums(12, 8, sums)).items() if k.startswith("domain/")}
    assert found == {
        "domain/code/token_kl": 1.0,
        "domain/code/loss_share": 0.75,
        "domain/law/loss_share": 0.0,
        "domain/math/token_kl": 1.5,
        "domain/math/loss_share": 0.75,
    }


def rollout(i: int, route: int, n_response: int) -> Rollout:
    ids = np.full(n_response, i, np.int32)
    zeros = np.zeros(n_response, np.float32)
    return Rollout(i, i, np.ones(2, np.int32), ids, zeros, (), "stop", on_policy=False, route=route)


BATCH = [rollout(i, *each) for i, each in enumerate([(0, 8), (0, 6), (2, 1), (2, 3), (0, 2)])]
TEACHERS = [Route(name, TeacherConfig(), weight) for name, weight in zip(DOMAINS, (1.0, 3.0, 0.5), strict=True)]


@pytest.mark.parametrize("normalize", NORMALIZATIONS)
def test_weights_of_each_normalization(normalize: str) -> None:
    """Fails if the mean of a global batch is another one than that of distill.normalize."""
    counts = route_counts(BATCH[:2], 3) + route_counts(BATCH[2:], 3)  # of two groups
    assert counts.tolist() == [[16, 3], [0, 0], [4, 2]]
    losses = [np.linspace(1, 2, len(r.response_ids)) * (1 + r.sample_index) for r in BATCH]
    weights = np.concatenate([sequence_weights(part, counts, TEACHERS, normalize) for part in (BATCH[:2], BATCH[2:])])
    got = sum(w * each.sum() for w, each in zip(weights, losses, strict=True)) / 20
    of_route = [np.concatenate([each for r, each in zip(BATCH, losses, strict=True) if r.route == k]) for k in (0, 2)]
    factors = [TEACHERS[r.route].weight for r in BATCH]
    expected = {
        "token": (of_route[0].sum() + 0.5 * of_route[1].sum()) / 20,
        "sequence": sum(w * each.mean() for w, each in zip(factors, losses, strict=True)) / 5,
        "domain": of_route[0].mean() + 0.5 * of_route[1].mean(),
    }[normalize]
    assert got == pytest.approx(expected, rel=1e-6) and weights.dtype == np.float32
    assert size_numbers(counts, TEACHERS) == {
        "domain/code/tokens_share": 0.8,
        "domain/code/length": 16 / 3,
        "domain/law/tokens_share": 0.0,
        "domain/math/tokens_share": 0.2,
        "domain/math/length": 2.0,
    }
    assert size_numbers(route_counts(BATCH[:2], 1), [Route("", TeacherConfig())]) == {}


def test_one_domain_is_the_token_mean_to_the_bit() -> None:
    """Fails if distill.normalize: domain changes a run whose rows have one route."""
    assert sequence_weights(BATCH[:2], route_counts(BATCH[:2], 3), TEACHERS, "domain").tolist() == [1.0, 1.0]


def test_rows_carry_route_and_weight_of_their_sequence() -> None:
    """Fails if micro-batches, packed or padded, mix up the rows of two sequences."""
    scores = [TeacherScores(sampled_logprobs=np.zeros(len(r.response_ids), np.float32)) for r in BATCH]
    weights = np.arange(5, dtype=np.float32)
    for packed in (False, True):
        batches = make_micro_batches(BATCH, scores, micro_batch_size=2, max_tokens=12, packed=packed)
        assert batches[0].targets is not None and batches[0].targets.weights is None
        for batch in replace(batches, weights=weights)[:]:
            targets = batch.targets
            of_row = [BATCH[i] for i in targets.sampled_ids.tolist()]
            assert targets.routes.tolist() == [r.route for r in of_row]
            assert targets.weights.tolist() == [float(r.sample_index) for r in of_row]
        assert without_targets(replace(batches, weights=weights))[0].targets is None
