"""The loss's memory on a rank that has the LM head: logits, tables of the teacher, the head's gradient.

Fused, the logits of a chunk of rows exist at a time, and the gradients of hidden states and head are made in the
forward pass; else all logits of a micro-batch, whose gradient takes their place. See `gkd.loss.distill_loss`.

Letters: N loss rows, V vocabulary rows of this rank, H hidden size, K entries of the teacher's list, b bytes of a
number.
"""

from __future__ import annotations

from dataclasses import dataclass

from gkd.config.derived import derive
from gkd.config.schema import Config
from gkd.footprint.batch import BatchShape

_FLOAT32, _INT64 = 4, 8
# Numbers of a piece of rows that the softmax kernels work on at a time, see gkd.loss.row_kernels.
_PIECE = {True: 1 << 21, False: 1 << 22}  # on the CPU, on CUDA
# [n, K] tables beside the teacher's while the loss of n rows is computed: logprobs, shares, gradients.
_TABLES = 12


@dataclass(frozen=True, slots=True)
class LossShape:
    """The loss of one micro-batch on one rank."""

    hidden: int
    rows_of_head: int  # V, padding included
    itemsize: int
    on_cpu: bool
    batch: BatchShape
    fused: bool
    chunk_bytes: int
    topk: int  # 0 without a list
    is_full: bool  # the teacher's whole distribution is there
    frozen: bool = False  # the LM head is not trained, and has no gradient

    @property
    def rows_at_once(self) -> int:
        """Rows of logits that exist together."""
        if not self.fused:
            return self.batch.n_rows
        return min(self.batch.n_rows, self._chunk_rows)

    @property
    def _chunk_rows(self) -> int:
        return max(1, self.chunk_bytes // (self.rows_of_head * (self.itemsize + (_FLOAT32 if self.is_full else 0))))

    @property
    def logits_bytes(self) -> int:
        """Logits, the teacher's too where there are any, the kernels' working memory, and tables."""
        n, v = self.rows_at_once, self.rows_of_head
        logits = n * v * self.itemsize
        if self.is_full:
            logits += min(self.batch.n_rows, self._chunk_rows) * v * _FLOAT32
        piece = max(min(_PIECE[self.on_cpu], n * v), v) * _FLOAT32 * (1 if self.itemsize == _FLOAT32 else 2)
        listed = self.batch.n_rows * self.topk * (_INT64 + _FLOAT32)
        return logits + piece + listed + n * (self.topk + 1) * _FLOAT32 * _TABLES

    @property
    def forward_bytes(self) -> int:
        """What is there while the loss is computed, beside logits: hidden rows and, fused, both gradients."""
        b, head = self.itemsize, 0 if self.frozen else self.rows_of_head * self.hidden
        rows = self.batch.n_rows * self.hidden * b
        if not self.fused:
            return rows
        if b == _FLOAT32:
            return 2 * rows + _FLOAT32 * head
        # The sum over chunks is float32, and each chunk's part is there beside it: float32 on CUDA.
        return 2 * rows + (_FLOAT32 + (b if self.on_cpu else _FLOAT32)) * head

    @property
    def head_grad_bytes(self) -> int:
        """The LM head's gradient on its way to where gradients are summed."""
        return 0 if self.frozen else self.rows_of_head * self.hidden * self.itemsize

    @property
    def backward_bytes(self) -> int:
        """What of the loss is still there when the layers' backward pass begins."""
        b, rows = self.itemsize, self.batch.n_rows * self.hidden * self.itemsize
        if self.fused:
            return 2 * rows + self.head_grad_bytes
        return rows + self.batch.n_rows * self.rows_of_head * b + self.head_grad_bytes


def loss_shape(
    config: Config,
    batch: BatchShape,
    *,
    hidden: int,
    rows_of_head: int,
    itemsize: int,
    on_cpu: bool,
    frozen: bool = False,
) -> LossShape:
    """The loss of a config on a rank with so many rows of the LM head."""
    signals = derive(config).signals
    return LossShape(
        hidden=hidden,
        rows_of_head=rows_of_head,
        itemsize=itemsize,
        on_cpu=on_cpu,
        batch=batch,
        fused=config.actor.fused_lm_head,
        chunk_bytes=config.actor.logits_chunk_mib << 20,
        topk=config.teacher.topk if "topk" in signals else 0,
        is_full="logits" in signals or "hidden" in signals,
        frozen=frozen,
    )
