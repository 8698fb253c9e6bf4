"""Mask or replace a few chosen columns in each row of a large matrix.

Column -1 means none. A scatter needs equally long rows, so -1 is written to column 0, and column 0 is
restored afterwards. This avoids a device synchronization to count the valid entries.

Letters: n rows, v columns, K chosen columns per row, distinct except for -1.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def columns_without_mass(logits: Tensor, columns: Tensor) -> Iterator[None]:
    """Within the block, set `columns` [n, K] of `logits` [n, v] to -inf; restore them bit-exactly at the end.

    The version counter does not change, so autograd accepts logits that were saved for a backward pass.
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
    """Set out[n, columns[n, k]] = values[n, k] where columns[n, k] is not -1.

    Args:
        out: [n, v], v > 0.
        values: [n, K], of any float dtype.
    """
    is_first, first = columns == 0, out[:, 0].clone()
    # All writes to column 0 have the same value, so their order does not matter.
    at_first = torch.where(is_first, values, 0.0).sum(dim=-1, keepdim=True)
    out.scatter_(1, columns.clamp(min=0), torch.where(columns < 0, at_first, values).to(out.dtype))
    out[:, 0] = torch.where(is_first.any(dim=-1), at_first[:, 0].to(out.dtype), first)
