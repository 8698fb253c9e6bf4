"""distill.tail=residual: enumerated over all sampled tokens, its mean is the exact reverse KL; and its settings."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from gkd.config.check import check_config
from gkd.config.load import load_config
from gkd.config.loss_spec import LossSpec, LossTerm, Tail, teacher_signals
from gkd.errors import DataError
from gkd.loss.distill_loss import DistillLoss
from gkd.loss.row_kernels import TorchRows
from gkd.loss.vocab_parallel import VocabShard
from gkd.types import TokenTargets
from tests.unit.loss_cases import normal

T, WEIGHT = 0.7, 1.5
BASE = ["data.train_files=[x]", "model.path=m", "trainer.run_dir=r", "eval.metric=none"]


def exact(z: Tensor, log_p: Tensor) -> tuple[Tensor, Tensor]:
    """Return the reverse KL and its gradient in the logits [V]."""
    z = z.clone().requires_grad_()
    log_q = (z / T).log_softmax(-1)
    value = WEIGHT * (log_q.exp() * (log_q - log_p)).sum()
    value.backward()
    return value.detach(), z.grad


def every_token(log_p: Tensor, log_mu: Tensor, ids: Tensor) -> TokenTargets:
    """Return one row for each token of the vocabulary: row y has sampled token y."""
    v = len(log_p)
    return TokenTargets(
        torch.arange(v),
        log_mu,
        torch.ones(v, dtype=torch.bool),
        topk_ids=ids.expand(v, -1),
        topk_logprobs=log_p[ids].expand(v, -1),
        tail_mass=(1 - log_p[ids].exp().sum()).clamp(min=0).expand(v),
        sampled_logprobs=log_p,
    )


def loss_of(tail: Tail, v: int, clip: float = 0.0) -> DistillLoss:
    spec = LossSpec((LossTerm("reverse_kl", WEIGHT),), tail, T, importance_clip=clip)
    return DistillLoss(spec, teacher_signals(spec, "topk"), VocabShard(0, v, None), TorchRows(), chunk_bytes=3 * v * 8)


def mean(tail: Tail, z: Tensor, log_mu: Tensor, targets: TokenTargets, *, fused: bool) -> tuple[Tensor, Tensor]:
    """Return the means over y ~ mu of value and gradient [V] of the loss of row y."""
    v = len(z)
    loss, rows = loss_of(tail, v), z.repeat(v, 1).requires_grad_()
    values: list[Tensor] = []
    with loss.evaluating(values.append):  # the values of each row
        loss.from_logits(rows.detach().clone(), targets)
    if fused:  # with an identity head, hidden states are logits
        loss.from_hidden(rows, torch.eye(v, dtype=torch.float64), targets)[0].backward()
    else:
        loss.from_logits(rows, targets)[0].backward()
    return log_mu.exp() @ torch.cat(values)[:, 0], log_mu.exp() @ rows.grad


@pytest.mark.parametrize("fused", [True, False], ids=["head", "logits"])
@pytest.mark.parametrize("support", ["teacher", "student", "union"])
@pytest.mark.parametrize(("v", "k"), [(5, 2), (5, 4), (5, 5), (50, 1), (50, 10), (50, 50)])
def test_its_mean_is_the_exact_reverse_kl(v: int, k: int, support: str, fused: bool) -> None:
    """Fails if value or gradient are biased for any list, or the list of the whole vocabulary has a residual."""
    z, log_p = 2 * normal(v, seed=1), (2 * normal(v, seed=2)).log_softmax(-1)
    log_mu = normal(v, seed=3).log_softmax(-1)
    n_own = {"teacher": 0, "student": k, "union": k // 2}[support]
    own = z.topk(n_own).indices
    others = [i for i in log_p.argsort(descending=True).tolist() if i not in own][: k - n_own]
    targets = every_token(log_p, log_mu, torch.cat([own, torch.tensor(others, dtype=torch.int64)]))
    value, gradient = mean("residual", z, log_mu, targets, fused=fused)
    expected_value, expected = exact(z, log_p)
    torch.testing.assert_close(value, expected_value, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(gradient, expected, atol=1e-12, rtol=1e-12)
    bucket_value, bucket = mean("bucket", z, log_mu, targets, fused=fused)
    if k == v:
        torch.testing.assert_close(bucket, expected, atol=1e-12, rtol=1e-12)
    elif k < v - 1:  # with one token in the tail the bucket is exact
        assert abs(float(bucket_value - expected_value)) > 1e-6 and float((bucket - expected).abs().max()) > 1e-6


def test_rounded_probabilities_do_not_bias_it() -> None:
    """Fails if the sampled token is not scaled as the list, whose probabilities fp16 rounds to another sum than 1."""
    v, z = 50, 2 * normal(50, seed=1)
    log_p, log_mu = (2 * normal(v, seed=2)).log_softmax(-1), normal(v, seed=3).log_softmax(-1)
    ids = log_p.topk(10).indices
    targets = every_token(log_p + 0.01, log_mu, ids)
    targets.tail_mass = (1 - log_p[ids].exp().sum()).expand(v) * torch.e**0.01
    _, gradient = mean("residual", z, log_mu, targets, fused=True)
    torch.testing.assert_close(gradient, exact(z, log_p)[1], atol=1e-12, rtol=1e-12)


def test_tokens_in_the_list_and_of_the_dataset_have_no_residual() -> None:
    """Fails if a listed token, a dataset token or one with an infinite logprob changes the loss of the bucket."""
    v = 50
    z, log_p = 2 * normal(v, seed=1), (2 * normal(v, seed=2)).log_softmax(-1)
    log_mu, ids = normal(v, seed=3).log_softmax(-1), log_p.topk(10).indices
    of_student, of_dataset = every_token(log_p, log_mu, ids), every_token(log_p, log_mu, ids)
    of_dataset.on_policy = torch.zeros(v, dtype=torch.bool)
    of_dataset.sampled_logprobs = torch.full((v,), -torch.inf, dtype=torch.float64)
    values: dict[str, list[Tensor]] = {"student": [], "dataset": [], "bucket": []}
    for name, targets, tail in (
        ("student", of_student, "residual"),
        ("dataset", of_dataset, "residual"),
        ("bucket", of_student, "bucket"),
    ):
        loss = loss_of(tail, v)  # type: ignore[arg-type]
        with loss.evaluating(values[name].append):
            loss.from_logits(z.repeat(v, 1), targets)
    student, dataset, bucket = (torch.cat(each)[:, 0] for each in values.values())
    torch.testing.assert_close(dataset, bucket, atol=0, rtol=0)
    torch.testing.assert_close(student[ids], bucket[ids], atol=0, rtol=0)
    assert (student != bucket).sum() == v - len(ids)


def test_the_clip_limits_it() -> None:
    """Fails if distill.importance_clip has no effect on the residual."""
    v = 50
    z, log_p = 2 * normal(v, seed=1), (2 * normal(v, seed=2)).log_softmax(-1)
    ids = log_p.topk(10).indices
    rare = every_token(log_p, torch.full((v,), -30.0, dtype=torch.float64), ids)
    exact_rho = every_token(log_p, (z / T).log_softmax(-1) - torch.tensor(2.0).double().log(), ids)
    values: list[Tensor] = []
    for targets, clip in ((rare, 2.0), (exact_rho, 0.0)):
        loss = loss_of("residual", v, clip)
        with loss.evaluating(values.append):
            loss.from_logits(z.repeat(v, 1), targets)
    n = len(values) // 2
    torch.testing.assert_close(torch.cat(values[:n])[:, 0], torch.cat(values[n:])[:, 0])


def test_a_micro_batch_without_the_sampled_logprobs_is_refused() -> None:
    """Fails if tables of a run without the residual are trained on as if there were none."""
    v, log_p = 5, normal(5).log_softmax(-1)
    targets = replace(every_token(log_p, log_p, torch.arange(2)), sampled_logprobs=None)
    with pytest.raises(DataError):
        loss_of("residual", v).from_logits(normal(v, v), targets)


def test_it_asks_for_the_sampled_token() -> None:
    """Fails if the teacher does not send what the residual needs, or the importance weights are not reported."""
    config = load_config(None, [*BASE, "distill.tail=residual", "distill.loss=reverse_kl", "distill.support=union"])
    derived = check_config(config)
    assert derived.signals == ("topk", "sampled") and derived.loss.uses_samples
    names = loss_of("residual", 5).report_names
    assert {"importance_weight", "importance_clipped", "sampled_reverse_kl", "reverse_kl"} <= set(names)
