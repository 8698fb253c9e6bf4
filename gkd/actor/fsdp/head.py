"""The student's LM head on the rows that carry loss, and the loss with it where the two are fused.

A module with the parameters of the head it stands for, so that fully_shard gathers them for exactly this forward pass
and takes their gradient from it.

Letters: B sequences, S columns, N loss rows, H hidden size, V rows of the head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from gkd.errors import ModelError

# What to do with the [N, H] hidden states and the [V, H] weight, which is whole only for the time of the call.
HeadUse = Callable[[Tensor, Tensor], Any]


class RowsHead(nn.Module):
    """Takes the place of a model's LM head, under the same parameter names."""

    rows: Tensor | None = None  # [N] int64 into the flattened [B * S] positions, for the time of a forward pass

    def __init__(self, head: nn.Module) -> None:
        """Raises ModelError for a head that is not one linear layer."""
        super().__init__()
        if not isinstance(head, nn.Linear):
            raise ModelError(f"the LM head is a {type(head).__name__}; actor.strategy=fsdp2 takes a linear layer.")
        self.weight, self.bias = head.weight, head.bias  # [V, H], [V] or None

    def forward(self, hidden: Tensor, use: HeadUse | None = None) -> Any:
        """[B, S, H] hidden states -> [1, N, V] logits; with `use`, what that returns."""
        if self.rows is not None:
            hidden = hidden.flatten(0, 1).index_select(0, self.rows)[None]
        return F.linear(hidden, self.weight, self.bias) if use is None else use(hidden[0], self.weight)
