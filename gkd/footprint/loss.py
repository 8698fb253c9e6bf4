"""Compute the memory of the loss on a rank with the LM head: logits, teacher tables, gradient of the head.

Fused, only the logits of a chunk of rows exist at a time, and the gradients of hidden states and head are computed in
the forward pass. Otherwise all logits of a micro-batch exist, and are overwritten by their gradient. See
`gkd.loss.distill_loss`.

Letters: N loss rows, V vocabulary rows of this rank, H hidden size, K entries of the teacher's top-k list, b bytes per
number.
"""

from __future__ import annotations

from dataclasses import dataclass

from gkd.config.schema import Config, logits_chunk_bytes
from gkd.footprint.activations import MicroBatchShape

_FLOAT32, _INT64 = 4, 8
# Numbers that the softmax kernels process at a time, see gkd.loss.row_kernels.
_PIECE = {True: 1 << 21, False: 1 << 22}  # on the CPU, on CUDA
# [n, K] tables of the loss of n rows, in addition to the teacher's: logprobs, shares, gradients.
_TABLES = 12


@dataclass(frozen=True, slots=True)
class LossShape:
    """The loss of one micro-batch on one rank."""

    hidden: int
    rows_of_head: int  # V, padding included
    itemsize: int
    on_cpu: bool
    batch: MicroBatchShape
    fused: bool
    chunk_bytes: int
    topk: int  # 0 without a list
    is_full: bool  # the teacher's full distribution exists as logits
    frozen: bool = False  # the LM head is not trained and has no gradient
    in_place: bool = False  # fused, the LM head's gradient is added to the gradient buffer by the loss

    @property
    def rows_at_once(self) -> int:
        """Rows of logits that exist at a time."""
        if not self.fused:
            return self.batch.n_rows
        return min(self.batch.n_rows, self._chunk_rows)

    @property
    def _chunk_rows(self) -> int:
        return max(1, self.chunk_bytes // (self.rows_of_head * (self.itemsize + (_FLOAT32 if self.is_full else 0))))

    @property
    def logits_bytes(self) -> int:
        """Bytes of the logits, of the teacher's logits if any, of the kernels' working memory, and of tables."""
        n, v = self.rows_at_once, self.rows_of_head
        logits = n * v * self.itemsize
        if self.is_full:
            logits += min(self.batch.n_rows, self._chunk_rows) * v * _FLOAT32
        piece = max(min(_PIECE[self.on_cpu], n * v), v) * _FLOAT32 * (1 if self.itemsize == _FLOAT32 else 2)
        listed = self.batch.n_rows * self.topk * (_INT64 + _FLOAT32)
        return logits + piece + listed + n * (self.topk + 1) * _FLOAT32 * _TABLES

    @property
    def forward_bytes(self) -> int:
        """Bytes while the loss is computed, without logits: hidden rows and, fused, both gradients."""
        b, head = self.itemsize, 0 if self.frozen else self.rows_of_head * self.hidden
        rows = self.batch.n_rows * self.hidden * b
        if not self.fused:
            return rows
        if self.in_place:
            return 2 * rows + (b * head if self.on_cpu and b < _FLOAT32 else 0)  # a chunk's part
        if b == _FLOAT32:
            return 2 * rows + _FLOAT32 * head
        # The sum over chunks is float32. In addition a chunk's part exists on the CPU, and at the end the cast sum.
        return 2 * rows + (_FLOAT32 + b) * head

    @property
    def head_grad_bytes(self) -> int:
        """Bytes of the LM head's gradient before it is added to the gradient buffer."""
        kept = not self.frozen and not (self.fused and self.in_place)
        return self.rows_of_head * self.hidden * self.itemsize if kept else 0

    @property
    def backward_bytes(self) -> int:
        """Bytes of the loss that remain when the layers' backward pass starts."""
        b, rows = self.itemsize, self.batch.n_rows * self.hidden * self.itemsize
        if self.fused:
            return 2 * rows + self.head_grad_bytes
        return rows + self.batch.n_rows * self.rows_of_head * b + self.head_grad_bytes


def loss_shape(
    config: Config,
    batch: MicroBatchShape,
    *,
    hidden: int,
    rows_of_head: int,
    itemsize: int,
    on_cpu: bool,
    frozen: bool = False,
    in_place: bool = False,
) -> LossShape:
    """Return the loss of these settings on a rank with `rows_of_head` rows of the LM head."""
    signals = config.derived.signals
    return LossShape(
        hidden=hidden,
        rows_of_head=rows_of_head,
        itemsize=itemsize,
        on_cpu=on_cpu,
        batch=batch,
        fused=config.actor.fused_lm_head,
        chunk_bytes=logits_chunk_bytes(on_cpu=on_cpu),
        topk=config.teacher.topk if "topk" in signals else 0,
        is_full="logits" in signals or "hidden" in signals,
        frozen=frozen,
        in_place=in_place,
    )
