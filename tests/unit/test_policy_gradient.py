"""Test the values of k1, k2, k3 and their expected gradients, enumerated over a vocabulary of 5."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from gkd.config.loss_spec import POLICY_GRADIENT_NAMES, LossSpec, LossTerm
from gkd.errors import DataError
from gkd.loss.policy_gradient import log_importance_weights, policy_gradient_loss, reverse_kl_estimate
from gkd.loss.vocab_parallel import VocabShard
from gkd.types import TokenTargets
from tests.unit.loss_cases import distill_loss, normal

V, V_PADDED, T = 5, 7, 0.7
SHARD = VocabShard(0, V, None)
Z = normal(V_PADDED, seed=1)
LOG_P = normal(V, seed=2).log_softmax(dim=-1)
LOG_MU = normal(V, seed=3).log_softmax(dim=-1)  # the sampling distribution, which is not the student
LOG_R = normal(V, seed=4).log_softmax(dim=-1)


def _every_token() -> TokenTargets:
    """Return one row for each token that can be sampled."""
    return TokenTargets(
        torch.arange(V), LOG_MU, torch.ones(V, dtype=torch.bool), sampled_logprobs=LOG_P, reference_logprobs=LOG_R
    )


def test_clip_bounds_the_weight_and_returns_where() -> None:
    """Fails if a weight above the limit passes, one below is changed, or the report counts the wrong tokens."""
    # A log weight of 1 is above log 2 and below 2.
    actor, rollout = torch.tensor([0.0, 0.0, 0.0, 0.0, -1.0]), torch.tensor([-3.0, -1.0, -0.5, 0.0, 0.0])
    log_weights, clipped = log_importance_weights(actor, rollout, 2.0)
    torch.testing.assert_close(log_weights.exp(), torch.tensor([2.0, 2.0, 1.6487213, 1.0, 0.3678794]))
    assert clipped.tolist() == [True, True, False, False, False]
    log_weights, clipped = log_importance_weights(actor.requires_grad_(), rollout, 0)
    assert float(log_weights[0]) == 3.0
    assert not clipped.any() and not log_weights.requires_grad


def test_k3_of_a_token_with_tiny_student_probability() -> None:
    """Fails if k3 overflows for a tiny q: p/q is infinite in float32, but rho p/q = p/mu is not."""
    actor, teacher, rollout = torch.tensor([-100.0]), torch.tensor([-0.5]), torch.tensor([-1.0])
    log_weights, _ = log_importance_weights(actor, rollout, 2.0)
    assert reverse_kl_estimate("k3", actor, teacher).isinf()
    assert float(policy_gradient_loss("k3", actor, teacher, log_weights)) == pytest.approx(math.exp(0.5))


@pytest.mark.parametrize("path", ["from_hidden", "from_logits"])
@pytest.mark.parametrize("scale", [0.0, 0.5, 1.0, 1.25])
@pytest.mark.parametrize("name", POLICY_GRADIENT_NAMES)
def test_expected_gradient_through_the_loss(name: str, scale: float, path: str) -> None:
    """Fails if the mean over y ~ mu of the gradient is not that of E_q[log q/r - scale log p/r], by enumeration, which
    is the reverse KL with a scale of 1; or if the fused head or the overwritten logits lose an importance weight or the
    temperature.
    """
    spec = LossSpec((LossTerm(name),), temperature=T, importance_clip=0, teacher_reward_scale=scale)
    assert spec.has_reference == (scale != 1) and spec.reference_weight == 0
    loss = distill_loss(spec, "sampled", chunk_rows=2, shard=SHARD)
    assert "reference_kl" not in loss.report_names
    logits = Z.repeat(V, 1).requires_grad_()
    if path == "from_logits":
        loss.from_logits(logits, _every_token())[0].backward()
    else:  # with an identity head, hidden states are logits
        loss.from_hidden(logits, torch.eye(V_PADDED, dtype=torch.float64), _every_token())[0].backward()
    z = Z.clone().requires_grad_()
    log_q = (z[:V] / T).log_softmax(dim=-1)
    reward = scale * (LOG_P - LOG_R) - (log_q - LOG_R)
    (exact,) = torch.autograd.grad(-(log_q.exp() * reward).sum(), z)
    torch.testing.assert_close(LOG_MU.exp() @ logits.grad, exact)
    if scale != 1:
        with pytest.raises(DataError):
            loss.from_logits(Z.repeat(V, 1), replace(_every_token(), reference_logprobs=None))
