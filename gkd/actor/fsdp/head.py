"""The student's LM head on the rows that carry loss, and the loss with it where the two are fused.

A module with the parameters of the head it stands for, so that fully_shard gathers them for exactly this forward pass
and takes their gradient from it.

Letters: B sequences, S columns, N loss rows, H hidden size, V rows of the head.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from gkd.errors import ModelError
from gkd.loss.distill_loss import DistillLoss
from gkd.types import TokenTargets


class RowsHead(nn.Module):
    """Takes the place of a model's LM head, under the same parameter names."""

    rows: Tensor | None = None  # [N] int64 into the flattened [B * S] positions, for the time of a forward pass

    def __init__(self, head: nn.Module) -> None:
        """Raises ModelError for a head that is not one linear layer."""
        super().__init__()
        if not isinstance(head, nn.Linear):
            raise ModelError(f"the LM head is a {type(head).__name__}; actor.strategy=fsdp2 takes a linear layer.")
        self.weight, self.bias = head.weight, head.bias  # [V, H], [V] or None

    def forward(
        self, hidden: Tensor, targets: TokenTargets | None = None, loss: DistillLoss | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """[B, S, H] hidden states -> [1, N, V] logits; with `loss`, what `DistillLoss.from_hidden` returns."""
        if self.rows is not None:
            hidden = hidden.flatten(0, 1).index_select(0, self.rows)[None]
        if loss is None:
            return F.linear(hidden, self.weight, self.bias)
        if targets is None:
            raise ModelError("the LM head was given a loss and nothing to learn from")
        return loss.from_hidden(hidden[0], self.weight, targets)
