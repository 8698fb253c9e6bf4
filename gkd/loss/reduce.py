"""Reduce per-token losses to the loss of a step: sum first, divide once.

    token_mean = sum over all loss tokens of the global batch / their number

Means of micro-batches or ranks are never averaged, because they have different numbers of tokens.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from gkd.errors import DataError


def sum_over_group(sums: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return the sum of each rank's `sums` over `group`; the same on all of its ranks.

    Args:
        sums: [...] any device; summed in float64, which counts a billion tokens exactly.
        group: the data-parallel group; None for a single rank.
    """
    total = sums.to(torch.float64)
    if group is not None:
        total = total.clone()
        dist.all_reduce(total, group=group)
    return total


def token_mean(token_sum: float, n_loss_tokens: int) -> float:
    """Return `token_sum / n_loss_tokens`, both over the global batch. Raises DataError if there is no loss token."""
    if n_loss_tokens <= 0:
        raise DataError(
            "the global batch has no loss token. Fix: check that prompts leave room for a response "
            "(data.max_response_length), and that it is longer than distill.skip_first_tokens."
        )
    return token_sum / n_loss_tokens
