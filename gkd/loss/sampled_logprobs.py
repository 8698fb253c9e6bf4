"""Compute the student's logprob of one id per row, without a loss.

Letters: N rows, H hidden size, V rows of the LM head, padding included.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gkd.loss.distill_loss import DistillLoss
from gkd.loss.vocab_parallel import row_logprobs


@torch.no_grad()
def logprobs_of_logits(loss: DistillLoss, logits: Tensor, ids: Tensor) -> Tensor:
    """Return [N] logprobs (nats) of [N] ids from [N, V] logits, with the loss's temperature and vocabulary."""
    kernels, temperature = loss.kernels, loss.spec.temperature
    rows = row_logprobs(logits, ids[:, None], loss.shard, kernels=kernels, n_listed=0, temperature=temperature)
    return rows.logprobs[:, 0]


@torch.no_grad()
def logprobs_of_hidden(loss: DistillLoss, hidden: Tensor, head: Tensor, ids: Tensor) -> Tensor:
    """Compute the same from [N, H] final hidden states and the [V, H] LM head, one chunk of logits at a time."""
    step = loss.rows_per_chunk(len(head), hidden.element_size())
    parts = [
        logprobs_of_logits(loss, hidden[i : i + step] @ head.T, ids[i : i + step]) for i in range(0, len(hidden), step)
    ]
    return torch.cat(parts) if parts else logprobs_of_logits(loss, hidden @ head.T, ids)
