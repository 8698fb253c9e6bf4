"""Compare the gradient of every divergence and tail policy with finite differences of its value, in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gkd.config.loss_spec import DIVERGENCE_NAMES, LossSpec, LossTerm, Tail
from gkd.loss.token_loss import topk_losses
from gkd.loss.vocab_parallel import VocabShard
from gkd.types import TokenTargets
from tests.unit.loss_cases import SHARD, TAILS, logprobs_of, normal, topk_of_mass, topk_targets

MASSES = (0.3, 0.7, 0.999)
TEMPERATURES = (0.7, 1.0, 2.0)


def _table_losses(
    logits: Tensor, targets: TokenTargets, spec: LossSpec, shard: VocabShard = SHARD, *, exact_tail: bool = True
) -> Tensor:
    ids, n_listed = torch.cat([targets.topk_ids, targets.sampled_ids[:, None]], dim=1), targets.topk_ids.shape[1]
    rows = logprobs_of(logits, ids, shard, n_listed=n_listed if exact_tail else 0, temperature=spec.temperature)
    tail = rows.tail if exact_tail else None
    return topk_losses(
        spec, targets, rows.logprobs[:, :-1], rows.logprobs[:, -1], rows.entropy, student_tail=tail
    ).total


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("name", DIVERGENCE_NAMES)
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_gradcheck(name: str, tail: Tail, temperature: float) -> None:
    """Fails if the gradient is not that of the stated loss, for example q - p where truncation makes it mass * q - p.

    One row per mass. For bucket, the student's tail is computed from the vocabulary and from the list, with and
    without a tail mass from the teacher.
    """
    spec = LossSpec((LossTerm(name, beta=0.3, alpha=0.2),), tail, temperature)
    shard = VocabShard(0, 7, None)
    ids, logprobs = (torch.cat(parts) for parts in zip(*(topk_of_mass(m, 1, 7, 3) for m in MASSES), strict=True))
    logits = normal(len(MASSES), 8, seed=1).requires_grad_()
    outside = 1 - logprobs.exp().sum(dim=-1)
    cases = ((outside, True), (outside, False), (None, True)) if tail == "bucket" else ((outside, True),)
    for tail_mass, exact in cases:
        targets = topk_targets(ids, logprobs, tail_mass)

        def losses(z: Tensor, targets: TokenTargets = targets, exact: bool = exact) -> Tensor:
            return _table_losses(z, targets, spec, shard, exact_tail=exact)

        assert torch.autograd.gradcheck(losses, (logits,))
