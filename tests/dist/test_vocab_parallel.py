"""Compare vocabulary-parallel logprobs over ranks with the dense computation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from gkd.loss.row_kernels import TorchRows
from gkd.loss.vocab_parallel import VocabShard, vocab_parallel_logprobs
from tests.device import rank_device
from tests.dist.helpers import run_ranks

# 21: divided by neither 2 nor 4. 5: at TP 4 two rows per rank, so rank 2 holds one padded row and rank 3 only padding.
VOCABULARIES = (21, 5)


def _case(vocab: int, tp: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return [N, padded] logits with large padding, [N, C] ids on every shard boundary, [N, C] weights."""
    rows = -(-vocab // tp)
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn((5, rows * tp), generator=generator)
    logits[:, vocab:] = 50.0
    borders = sorted({min(max(r * rows + d, 0), vocab - 1) for r in range(tp + 1) for d in (-1, 0)} | {0, 1, vocab - 1})
    width = len(borders)
    ids = torch.tensor([borders, borders[::-1], [0] * width, [vocab - 1] * width, borders])
    ids[4, width // 2 :] = -1  # a row with a shorter list
    weights = torch.rand(ids.shape, generator=generator) / width
    return logits.to(rank_device()), ids.to(rank_device()), weights.to(rank_device())


def _worst_difference(rank: int, world_size: int) -> dict[str, float]:
    """Return, in a rank, the largest difference from dense of values and of this rank's gradient."""
    worst = dict.fromkeys(("logprobs", "entropy", "grad", "padding_grad"), 0.0)
    for vocab in VOCABULARIES:
        logits, ids, weights = _case(vocab, world_size)
        rows = logits.shape[1] // world_size
        group = dist.group.WORLD if world_size > 1 else None
        weights = weights.masked_fill(ids < 0, 0.0)
        for temperature in (1.0, 0.7):
            for overwrite in (False, True):
                leaf = logits[:, rank * rows : (rank + 1) * rows].clone().requires_grad_()
                local = leaf.clone() if overwrite else leaf  # autograd does not allow in-place writes to a leaf
                got = vocab_parallel_logprobs(
                    local,
                    ids,
                    VocabShard(rank * rows, vocab, group),
                    kernels=TorchRows(),
                    temperature=temperature,
                    overwrite_logits=overwrite,
                )
                (got.logprobs.masked_fill(ids < 0, 0.0) * weights).sum().backward()
                dense = logits[:, :vocab].double().requires_grad_()
                log_q = torch.log_softmax(dense / temperature, dim=-1)
                picked = log_q.gather(1, ids.clamp(min=0))
                (picked * weights).sum().backward()
                n_real = max(0, min(rows, vocab - rank * rows))
                assert leaf.grad is not None and dense.grad is not None
                expected = dense.grad[:, rank * rows : rank * rows + n_real]
                _raise_to(worst, "logprobs", (got.logprobs - picked)[ids >= 0].detach())
                _raise_to(worst, "entropy", got.entropy + (log_q.exp() * log_q).sum(dim=-1).detach())
                _raise_to(worst, "grad", leaf.grad[:, :n_real] - expected)
                _raise_to(worst, "padding_grad", leaf.grad[:, n_real:])
    return worst


def _raise_to(worst: dict[str, Any], key: str, difference: torch.Tensor) -> None:
    if difference.numel():
        worst[key] = max(worst[key], float(difference.abs().max()))


@pytest.mark.dist
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_equals_dense(tp: int) -> None:
    """Fails if the gradient is wrong at a shard boundary, id 0 of a shard, a padded row, or padding of a short list."""
    ranks = [_worst_difference(0, 1)] if tp == 1 else run_ranks(_worst_difference, tp, timeout_s=60.0)
    for worst in ranks:
        assert max(worst["logprobs"], worst["entropy"], worst["grad"]) < 2e-6 and worst["padding_grad"] == 0.0, worst
