"""Compute the exact top-k of long rows in two stages: select the blocks that can contain it, then search them.

`torch.topk` runs its selection on all V numbers. But the k blocks with the largest maxima contain k
numbers that are at least as large as any number outside of them. So a maximum per block (one pass at
memory speed) leaves k * BLOCK candidates of V = 152k. The result is exact for any input; ties may be
broken in either order. `tests/bench/bench_engines.py` measures both methods.

Letters: C rows, V columns, K top-k entries.
"""

from __future__ import annotations

import torch

BLOCK = 64
MIN_SHRINK = 8  # use two stages if at most 1/8 of the columns remain; otherwise torch.topk is as fast


def topk(rows: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the k largest numbers of each row: values [C, K] in descending order and their columns [C, K] int64.

    A NaN counts as the largest number, as in torch.
    """
    if rows.shape[1] < MIN_SHRINK * BLOCK * k:
        return torch.topk(rows, k, dim=-1)
    return topk_two_stage(rows, k, BLOCK)


def topk_two_stage(rows: torch.Tensor, k: int, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `topk` by block maxima for any sizes. Requires at least k whole blocks."""
    n_blocks = rows.shape[1] // block
    n_whole = n_blocks * block
    maxima = rows[:, :n_whole].unflatten(1, (n_blocks, block)).amax(-1)  # [C, V / block]
    best = torch.topk(maxima, k, dim=-1, sorted=False).indices  # [C, K]
    inside = torch.arange(block, device=rows.device)
    columns = (best[:, :, None] * block + inside).flatten(1)  # [C, K * block]
    if n_whole < rows.shape[1]:  # columns after the last whole block are always candidates
        rest = torch.arange(n_whole, rows.shape[1], device=rows.device).expand(len(rows), -1)
        columns = torch.cat([columns, rest], dim=1)
    values, indices = torch.topk(rows.gather(1, columns), k, dim=-1)
    return values, columns.gather(1, indices)
