"""Share each micro-batch among the ranks of a context-parallel group, `actor.cp`: each computes some of its columns.

    columns of a row or pack    a a a a a b b b c c . .       a, b, c: sequences; dots: padding to a multiple of cp
    cp = 3                      rank 0  | rank 1 | rank 2

All ranks of a group build the same micro-batches. Everything but attention computes each position on its own, so a rank
needs nothing from the others: neither for the loss, whose targets are per row, nor for the gradients, which are summed
over the group like over data-parallel ranks. `gkd.actor.common.attention` is the exchange for attention.

Letters: B rows, S columns, s = S / cp columns of a rank, N loss rows of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from gkd.types import MicroBatch


@dataclass(frozen=True, slots=True)
class Columns:
    """Select the columns of each micro-batch that a rank computes."""

    group: dist.ProcessGroup | None = None  # the ranks that share them, in the order of their columns; None: this rank
    multiple: int = 1  # a rank's columns are padded to a multiple of it

    @property
    def size(self) -> int:
        return 1 if self.group is None else self.group.size()

    @property
    def rank(self) -> int:
        return 0 if self.group is None else self.group.rank()

    def part_of(self, batch: MicroBatch) -> MicroBatch:
        """Return this rank's columns of a micro-batch, and the loss rows in them; `cu_seqlens` are those of the pack.

        Padding is on the right; in a pack it is one more sequence.
        """
        length = batch.tokens.shape[1]
        n_own = self._width(length)
        missing = n_own * self.size - length
        if self.size == 1 and not missing:
            return batch
        first = self.rank * n_own
        rows = self.rows(batch)
        cu_seqlens = batch.cu_seqlens
        targets = batch.targets
        indices = batch.loss_index[rows]
        if cu_seqlens is not None and missing:
            cu_seqlens = F.pad(cu_seqlens, (0, 1), value=length + missing)
        return replace(
            batch,
            tokens=F.pad(batch.tokens, (0, missing))[:, first : first + n_own],
            position_ids=F.pad(batch.position_ids, (0, missing))[:, first : first + n_own],
            loss_index=indices // length * n_own + indices % length - first,
            targets=targets if targets is None or self.size == 1 else targets.rows(rows),
            cu_seqlens=cu_seqlens,
        )

    def rows(self, batch: MicroBatch) -> Tensor:
        """Return [n] int64, ascending: the micro-batch's loss rows that are in this rank's columns.

        Those of one sequence are neighbors.
        """
        length = batch.tokens.shape[1]
        return (batch.loss_index % length // self._width(length) == self.rank).nonzero().flatten()

    def gather(self, value: Any) -> list[Any]:
        """Return each rank's value, in the order of their columns. Collective over the group."""
        if self.group is None:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def whole(self, tables: Sequence[Tensor], batches: Sequence[MicroBatch]) -> list[Tensor]:
        """Return the rows of each micro-batch from the ranks' parts of them. Collective over the group.

        Args:
            tables: [n, ...] each, in host memory; concatenated, this rank's rows of all micro-batches. Empty: it has
                none.
            batches: whole micro-batches.
        """
        if self.size == 1:
            return list(tables)
        sizes = [batch.n_loss_tokens for batch in batches]
        starts = accumulate(sizes, initial=0)
        own_rows = [self.rows(batch) + start for batch, start in zip(batches, starts, strict=False)]
        gathered = self.gather((torch.cat(own_rows), torch.cat(list(tables))) if tables else None)
        filled = [part for part in gathered if part is not None]
        if not filled:
            return []
        rows, values = (torch.cat(tensors) for tensors in zip(*filled, strict=True))
        return list(values[rows.argsort()].split(sizes))

    def _width(self, length: int) -> int:
        """Return s."""
        return -(-length // (self.size * self.multiple)) * self.multiple


ALL_COLUMNS = Columns()
