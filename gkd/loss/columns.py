"""A few chosen columns of each row of a large matrix: take them out for a while, or replace them.

Column -1 means none. It cannot be left out of a scatter, whose rows are equally long, so it stands for
column 0, and column 0 is put right afterwards; there is no step that waits for a GPU to count.

Letters: n rows, v columns, K chosen ones of each row, distinct but for -1.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def columns_without_mass(logits: Tensor, columns: Tensor) -> Iterator[None]:
    """Inside, `logits` [n, v] has -inf in its `columns` [n, K]; after it, every bit is as before.

    So autograd is not told: whoever saved the logits for a backward pass may still use them.
    """
    index, first = columns.clamp(min=0), logits[:, 0].clone()
    kept = logits.gather(1, index)
    with torch.autograd._unsafe_preserve_version_counter(logits):
        set_columns(logits, columns, torch.full_like(kept, -torch.inf))
        try:
            yield
        finally:
            logits.scatter_(1, index, kept)
            logits[:, 0] = first


def set_columns(out: Tensor, columns: Tensor, values: Tensor) -> None:
    """out[n, columns[n, k]] = values[n, k], where columns[n, k] is not -1.

    Args:
        out: [n, v], v > 0.
        values: [n, K], of any float dtype.
    """
    is_first, first = columns == 0, out[:, 0].clone()
    # All that is written to column 0 is the same, so it does not matter which comes last.
    at_first = torch.where(is_first, values, 0.0).sum(dim=-1, keepdim=True)
    out.scatter_(1, columns.clamp(min=0), torch.where(columns < 0, at_first, values).to(out.dtype))
    out[:, 0] = torch.where(is_first.any(dim=-1), at_first[:, 0].to(out.dtype), first)
