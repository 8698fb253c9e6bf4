"""The vocabulary-parallel primitive over real gloo ranks equals the dense computation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from gkd.loss.divergence import Tail, forward_kl
from gkd.loss.vocab_parallel import vocab_parallel_topk_logprobs
from tests.dist.helpers import run_gloo

TAILS: tuple[Tail, ...] = ("bucket", "renorm", "drop")
# 21: divided by neither 2 nor 4. 5: at TP 4 two rows a rank, so rank 2 holds one padded row and rank 3 only padding.
VOCABULARIES = (21, 5)


def _case(vocab: int, tp: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[N, padded] logits with loud padding, [N, K] ids on every shard border, [N, K] teacher logprobs of mass 0.6."""
    rows = -(-vocab // tp)
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn((4, rows * tp), generator=generator)
    logits[:, vocab:] = 50.0
    borders = sorted({min(max(r * rows + d, 0), vocab - 1) for r in range(tp + 1) for d in (-1, 0)} | {0, 1, vocab - 1})
    ids = torch.tensor([borders, borders[::-1], [0] * len(borders), [vocab - 1] * len(borders)])
    shares = torch.rand(ids.shape, generator=generator) + 0.1
    # Repeated ids are no distribution, but the primitive and its gradient are linear in each entry.
    return logits, ids, (0.6 * shares / shares.sum(-1, keepdim=True)).log()


def _worst_difference(rank: int, world_size: int) -> dict[str, float]:
    """Runs in a rank: largest difference from dense in loss and in this rank's part of the gradient."""
    worst = {"loss": 0.0, "grad": 0.0, "padding_grad": 0.0}
    for vocab in VOCABULARIES:
        for tail in TAILS:
            for temperature in (1.0, 0.7):
                logits, ids, teacher = _case(vocab, world_size)
                rows = logits.shape[1] // world_size
                ids = ids[:2] if tail == "bucket" else ids  # repeats can push the student's mass over 1
                teacher = teacher[: len(ids)]
                local = logits[: len(ids), rank * rows : (rank + 1) * rows].clone().requires_grad_()
                student = vocab_parallel_topk_logprobs(
                    local,
                    ids,
                    vocab_start=rank * rows,
                    n_valid_vocab=vocab,
                    tp_group=dist.group.WORLD if world_size > 1 else None,
                    temperature=temperature,
                )
                loss = forward_kl(student, teacher, tail)
                loss.sum().backward()
                dense = logits[: len(ids), :vocab].clone().requires_grad_()
                dense_logprobs = torch.log_softmax(dense / temperature, dim=-1).gather(1, ids)
                dense_loss = forward_kl(dense_logprobs, teacher, tail)
                dense_loss.sum().backward()
                n_real = max(0, min(rows, vocab - rank * rows))
                assert local.grad is not None and dense.grad is not None
                wanted = dense.grad[:, rank * rows : rank * rows + n_real]
                _raise_to(worst, "loss", loss.detach() - dense_loss.detach())
                _raise_to(worst, "grad", local.grad[:, :n_real] - wanted)
                _raise_to(worst, "padding_grad", local.grad[:, n_real:])
    return worst


def _raise_to(worst: dict[str, Any], key: str, difference: torch.Tensor) -> None:
    if difference.numel():
        worst[key] = max(worst[key], float(difference.abs().max()))


@pytest.mark.dist
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_equals_dense(tp: int) -> None:
    """Fails if a shard border, id 0 of a shard, a padded row or a placeholder index loses or gains gradient."""
    for worst in run_gloo(_worst_difference, tp, timeout_s=60.0):
        assert worst["loss"] < 2e-6 and worst["grad"] < 2e-6 and worst["padding_grad"] == 0.0, worst
