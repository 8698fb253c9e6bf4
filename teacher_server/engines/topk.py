"""Exact top-k of long rows in two stages: first the blocks that can hold it, then inside those.

`torch.topk` moves every one of the V numbers through its selection. But the k blocks with the
largest maxima hold k numbers that are at least as large as anything outside of them, so a maximum
per block (one pass at memory speed) leaves k * BLOCK candidates of V = 152k. Exact for any input;
among equal numbers either way may pick any. `tests/bench/bench_engines.py` measures both.

Letters: C rows, V columns, K top-k entries.
"""

from __future__ import annotations

import torch

BLOCK = 64
MIN_SHRINK = 8  # two stages where they leave at most 1/8 of the columns; with more, torch.topk is as fast


def topk(rows: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k largest of each row: values [C, K] in descending order and their columns [C, K] int64.

    A NaN counts as the largest number, as in torch.
    """
    if rows.shape[1] < MIN_SHRINK * BLOCK * k:
        return torch.topk(rows, k, dim=-1)
    return topk_two_stage(rows, k, BLOCK)


def topk_two_stage(rows: torch.Tensor, k: int, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`topk` by block maxima, whatever the sizes; needs at least k whole blocks."""
    n_blocks = rows.shape[1] // block
    n_whole = n_blocks * block
    maxima = rows[:, :n_whole].unflatten(1, (n_blocks, block)).amax(-1)  # [C, V / block]
    best = torch.topk(maxima, k, dim=-1, sorted=False).indices  # [C, K]
    inside = torch.arange(block, device=rows.device)
    columns = (best[:, :, None] * block + inside).flatten(1)  # [C, K * block]
    if n_whole < rows.shape[1]:  # the columns that fill no block are candidates, always
        rest = torch.arange(n_whole, rows.shape[1], device=rows.device).expand(len(rows), -1)
        columns = torch.cat([columns, rest], dim=1)
    values, places = torch.topk(rows.gather(1, columns), k, dim=-1)
    return values, columns.gather(1, places)
