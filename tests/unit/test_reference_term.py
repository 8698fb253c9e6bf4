"""The KL to the reference: its value, its gradient, the tokens it applies to, and its inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from gkd.actor.common.step import BatchSums, diagnostics
from gkd.config.loss_spec import LossSpec, LossTerm
from gkd.data.batching import check_batch, make_micro_batches
from gkd.data.scatter import ChunkInputs
from gkd.errors import DataError, TeacherError
from gkd.types import Rollout, TeacherScores, TokenTargets
from teacher_server.wire.protocol import Signal
from tests.unit.loss_cases import Batch, N, V, normal, train, written_out

MIXTURE = (LossTerm("reverse_kl"), LossTerm("k2", 0.5), LossTerm("sft", 0.25))
CLIP, WEIGHT = 1.1, 0.3
SMALL, SMALL_T = 5, 0.7


def _targets(batch: Batch, signal: Signal, temperature: float, reference: Tensor) -> TokenTargets:
    """Return targets with the reference logprobs of [N, V]; -inf for the dataset's tokens, which must not be used."""
    picked = reference.gather(1, batch.sampled_ids[:, None])[:, 0].masked_fill(~batch.on_policy, -torch.inf)
    return replace(batch.targets(signal, temperature), reference_logprobs=picked)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("temperature", [0.7, 2.0])
@pytest.mark.parametrize("signal", ["topk", "sampled", "logits", "hidden"])
def test_value_and_gradient_equal_the_formula(signal: Signal, temperature: float, fused: bool) -> None:
    """Fails if the term lacks its weight, its importance weight, the clip or the temperature, includes the dataset's
    tokens, or changes the other losses."""
    batch = Batch()
    terms = MIXTURE[1:] if signal == "sampled" else MIXTURE
    spec = LossSpec(terms, "bucket", temperature, CLIP, WEIGHT)
    hidden, head = batch.hidden.clone().requires_grad_(), batch.head.clone().requires_grad_()
    logits = hidden @ head.T
    kept = "hidden" if signal == "sampled" else signal  # the signals that determine the formula
    values, scalar = written_out(spec, batch, kept, logits)
    reference = (normal(N, V, seed=8) / temperature).log_softmax(-1)
    log_q = (logits[:, :V] / temperature).log_softmax(-1).gather(1, batch.sampled_ids[:, None])[:, 0]
    ratio = log_q.detach() - reference.gather(1, batch.sampled_ids[:, None])[:, 0]
    rho = (log_q.detach() - batch.rollout_logprobs).exp()
    assert (rho > CLIP)[batch.on_policy].any() and (rho < CLIP)[batch.on_policy].any()
    rho = rho.clamp(max=CLIP) * batch.on_policy
    expected = rho * ((-ratio).exp() - 1 + ratio)
    (scalar + WEIGHT * (rho * ratio * log_q).sum()).backward()
    loss, targets = batch.loss(spec, signal, 3), _targets(batch, signal, temperature, reference)
    tables: list[Tensor] = []
    loss.on_rows = tables.append
    _, _, *grads = train(loss, batch, targets, fused=fused)
    found = dict(zip(loss.report_names, torch.cat(tables).T, strict=True))
    torch.testing.assert_close(found["reference_kl"], expected)
    torch.testing.assert_close(found["total"], values["total"] + WEIGHT * expected)
    torch.testing.assert_close(grads, [hidden.grad, head.grad])


def test_the_metric_is_the_mean_over_on_policy_tokens() -> None:
    """Fails if the dataset's tokens, for which the term is not defined, are counted in the mean."""
    loss = Batch().loss(LossSpec(reference_weight=1.0), "topk")
    sums = dict.fromkeys(loss.report_names, 6.0)
    found = diagnostics(loss, BatchSums(n_loss_tokens=6, n_on_policy=3, values=sums))
    assert found["loss/reference_kl"] == found["loss/importance_weight"] == 2.0 == 2 * found["loss/forward_kl"]
    assert "loss/reference_kl" not in diagnostics(loss, BatchSums(n_loss_tokens=6, n_on_policy=0, values=sums))


def test_an_evaluation_has_no_reference() -> None:
    """Fails if the validation loss has the term or requires its logprobs, or training lacks it afterwards."""
    batch = Batch()
    loss = batch.loss(LossSpec(reference_weight=2.0), "topk")
    without = batch.targets("topk", 1.0)
    before = loss.report_names
    fault = DataError("of the evaluation")
    with pytest.raises(DataError) as caught, loss.evaluating(None):
        assert (
            loss.report_names
            == loss.evaluation_names
            == tuple(n for n in before if "reference" not in n and not n.startswith("importance"))
        )
        total, _ = loss.from_hidden(batch.hidden, batch.head, without)
        plain, _ = batch.loss(LossSpec(), "topk").from_hidden(batch.hidden, batch.head, without)
        assert float(total) == float(plain)
        raise fault
    assert caught.value is fault
    assert loss.report_names == before and "reference_kl" in before and loss.on_rows is None
    for compute in (
        lambda: loss.from_hidden(batch.hidden, batch.head, without),
        lambda: loss.from_logits(batch.hidden @ batch.head.T, without),
    ):
        with pytest.raises(DataError):
            compute()


def _rollout(i: int, n: int) -> Rollout:
    ids, logprobs = np.arange(1, n + 1, dtype=np.int32), np.zeros(n, np.float32)
    return Rollout(i, i, np.array([1], np.int32), ids, logprobs, (), "stop")


def _scores(n: int) -> TeacherScores:
    return TeacherScores(sampled_logprobs=-np.ones(n, np.float32))


def _referenced(
    scores: list[list[TeacherScores]], references: Sequence[list[np.ndarray | None]]
) -> Sequence[list[TeacherScores]]:
    return ChunkInputs([None], [], scores, references).scores_with_reference()


def test_logprobs_stay_with_their_tokens() -> None:
    """Fails if a token gets the reference logprob of another one."""
    rollouts = [_rollout(i, n) for i, n in enumerate((3, 1, 2))]
    references = [[-r.response_ids.astype(np.float32) - 10 * r.prompt_id for r in rollouts]]
    (scored,) = _referenced([[_scores(len(r.response_ids)) for r in rollouts]], references)
    check_batch(rollouts, scored, where="actor rank 0", n_vocab=9, signals=("sampled",), with_reference=True)
    for batch in make_micro_batches(rollouts, scored, micro_batch_size=2, max_tokens=0, packed=True):
        targets = batch.targets
        owners = torch.tensor([i for i, n in batch.samples for _ in range(n)])
        torch.testing.assert_close(targets.reference_logprobs, -targets.sampled_ids.float() - 10 * owners)
    assert _referenced([scored], []) == [scored]


def test_invalid_reference_logprobs_are_refused() -> None:
    """Fails if NaNs, logprobs of other tokens, or no logprobs reach the loss."""
    rollout, score = _rollout(4, 3), _scores(3)
    cases = {
        "reference_logprobs": None,
        "float32 \\[2\\]": -np.ones(2, np.float32),
        "float64": -np.ones(3),
        "response position 1 ": np.array([-1, np.nan, -1], np.float32),
        "response position 2 ": np.array([-1, -1, 1], np.float32),
    }
    for text, logprobs in cases.items():
        bad = [replace(score, reference_logprobs=logprobs)]
        with pytest.raises(TeacherError, match=f"actor rank 1: prompt 4, sample 4: .*{text}"):
            check_batch([rollout], bad, where="actor rank 1", n_vocab=9, signals=("sampled",), with_reference=True)
        check_batch([rollout], bad, where="actor rank 1", n_vocab=9, signals=("sampled",))
    with pytest.raises(DataError):
        _referenced([[score]], [[np.zeros(3, np.float32)] * 2])
    some = [replace(score, reference_logprobs=-np.ones(3, np.float32)), score]
    with pytest.raises(DataError):
        make_micro_batches([rollout, rollout], some, micro_batch_size=2)


def test_references_of_a_part_of_a_chunk_keep_their_places() -> None:
    """Fails if a step that takes a part of a chunk trains with the reference logprobs of another sequence."""
    (scored,) = _referenced([[_scores(3) for _ in range(4)]], [[None, np.full(3, 0.5, np.float32)]])
    assert [s.reference_logprobs is None for s in scored] == [True, False, True, True]
