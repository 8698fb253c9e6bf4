"""Apply the student's LM head to the rows that carry loss, optionally fused with the loss.

The module has the parameters of the head that it replaces. So fully_shard gathers them for exactly this forward pass
and reduces their gradient after its backward pass.

Letters: B sequences, S columns, N loss rows, H hidden size, V rows of the head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from gkd.errors import ModelError

# Function of the [N, H] hidden states and the [V, H] weight. The weight is gathered only during the call.
HeadUse = Callable[[Tensor, Tensor], Any]


class RowsHead(nn.Module):
    """Replacement of a model's LM head with the same parameter names."""

    rows: Tensor | None = None  # [N] int64 into the flattened [B * S] positions; set during a forward pass

    def __init__(self, head: nn.Module) -> None:
        """Raise ModelError if the head is not one linear layer."""
        super().__init__()
        if not isinstance(head, nn.Linear):
            raise ModelError(f"the LM head is a {type(head).__name__}; actor.strategy=fsdp2 requires a linear layer.")
        self.weight, self.bias = head.weight, head.bias  # [V, H], [V] or None

    def forward(self, hidden: Tensor, use: HeadUse | None = None) -> Any:
        """Return [1, N, V] logits of [B, S, H] hidden states, or the result of `use`."""
        if self.rows is not None:
            hidden = hidden.flatten(0, 1).index_select(0, self.rows)[None]
        return F.linear(hidden, self.weight, self.bias) if use is None else use(hidden[0], self.weight)
