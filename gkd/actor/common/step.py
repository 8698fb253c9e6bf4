"""What a training step is on either backend: sums of a global batch, what they mean, when they are refused.

Letters: B sequences, S columns, N loss rows, V vocabulary, D hidden size of the teacher.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gkd.config.loss_spec import SFT
from gkd.data.collate import MicroBatches
from gkd.errors import DataError, NumericsError
from gkd.handles import TrainStats
from gkd.loss.distill_loss import DistillLoss
from gkd.loss.reduce import token_mean
from gkd.loss.token_loss import ON_POLICY_VALUES
from gkd.types import MicroBatch, TokenTargets


@dataclass(frozen=True, slots=True)
class BatchSums:
    """Sums over all loss tokens of the global batch; the same on every rank."""

    n_loss_tokens: int
    n_on_policy: int  # those of them that the student wrote
    values: dict[str, float]  # by the names of `DistillLoss.report_names`; "total" is the loss, nats


def not_finite(step: int, loss: float, grad_norm: float) -> NumericsError | None:
    """The error that ends a step before the optimizer moves; None: all is well."""
    if math.isfinite(loss) and math.isfinite(grad_norm):
        return None
    return NumericsError(
        f"step {step}: loss = {loss}, gradient norm = {grad_norm}. The optimizer has not moved. "
        "Lower actor.optim.lr; with reverse_kl, look for tokens that the teacher gives probability 0."
    )


def evaluation(step: int, loss: DistillLoss, sums: BatchSums) -> TrainStats:
    """What a forward pass over a global batch found. NumericsError: the loss is not finite; DataError: no token."""
    mean = token_mean(sums.values["total"], sums.n_loss_tokens)
    if not math.isfinite(mean):
        raise NumericsError(f"evaluation at step {step}: loss = {mean}")
    return TrainStats(mean, sums.n_loss_tokens, grad_norm=0.0, lr=0.0, extra=diagnostics(loss, sums))


def diagnostics(loss: DistillLoss, sums: BatchSums) -> dict[str, float]:
    """Means over the tokens that each number is defined for; what is defined for none is left out."""
    on_policy = {term.name for term in loss.spec.policy_gradients} | ON_POLICY_VALUES
    n_dataset = sums.n_loss_tokens - sums.n_on_policy
    means = {}
    for name, value in sums.values.items():
        n = sums.n_on_policy if name in on_policy else n_dataset if name == SFT else sums.n_loss_tokens
        if n and name != "total":
            means[f"loss/{name}"] = value / n
    return means


def token_counts(batch: MicroBatch, targets: TokenTargets, device: torch.device) -> Tensor:
    """[2] float64: loss tokens of a micro-batch, and those of them that the student wrote."""
    counts = [batch.n_loss_tokens, int(targets.on_policy.sum())]
    return torch.tensor(counts, dtype=torch.float64, device=device)


def teacher_head_rows(head: np.ndarray, loss: DistillLoss, n_local: int, device: torch.device) -> Tensor:
    """The rows of the teacher's LM head that this rank's part of the vocabulary needs, on `device`.

    They move with the weights: 4 D bytes for each row, 2.5 GB for 152k rows of 4096. An fsdp2 rank has all of them,
    since it has all columns of the student's logits; with tensor parallelism a rank has its share.

    Args:
        head: [V, D] float32, over the vocabulary that student and teacher share.
        n_local: rows of the student's LM head on this rank.

    Raises:
        DataError: it has fewer rows than the student's vocabulary.
    """
    shard = loss.shard
    if head.ndim != 2 or len(head) < shard.n_valid:
        raise DataError(f"the teacher's LM head is {head.shape}; the student's vocabulary has {shard.n_valid} rows")
    rows = head[shard.start : shard.start + shard.n_columns(n_local)]
    # A copy in torch's own memory: the object store frees its own, and numpy's could not be moved to the host and back.
    return torch.tensor(rows, dtype=torch.float32, device=device)


def check_before(
    loss: DistillLoss, batch: MicroBatch, micro_batches: Sequence[MicroBatch], *, needs_scores: bool = True
) -> None:
    """Everything that can be wrong with a micro-batch, before a forward pass that other ranks take part in.

    Args:
        batch: of `bare(micro_batches)`.
        needs_scores: this rank computes the loss. Tables that are made when they are needed were looked at before they
            were handed in, see `gkd.data.batching.check_batch`.

    Raises:
        DataError, NumericsError: training on it would train on something else, or stop midway.
    """
    needs_scores = needs_scores and not isinstance(micro_batches, MicroBatches)
    check_micro_batch(batch, needs_scores=needs_scores)
    loss.shard.check(batch.tokens)
    if needs_scores and batch.targets is not None:
        loss.check(batch.targets)


def check_micro_batch(batch: MicroBatch, *, needs_scores: bool = True) -> None:
    """Raises DataError where training on `batch` would silently train on something else.

    Args:
        batch: in host memory.
        needs_scores: this rank computes the loss.
    """
    n_rows, n_positions = batch.n_loss_tokens, batch.tokens.numel()
    if n_rows and not 0 <= int(batch.loss_index.min()) <= int(batch.loss_index.max()) < n_positions:
        raise DataError(f"loss_index leaves the {n_positions} positions of its micro-batch")
    # Attention is causal over columns and rotary embeddings count columns, of a row or of a packed sequence.
    if batch.cu_seqlens is not None:
        _check_pack(batch, batch.cu_seqlens)
    else:
        columns = torch.arange(batch.tokens.shape[1]).expand_as(batch.tokens).flatten()
        if not torch.equal(batch.position_ids.flatten()[batch.loss_index], columns[batch.loss_index]):
            raise DataError(
                "position_ids are not column numbers: without cu_seqlens, sequences are padded on the right"
            )
    if needs_scores and (batch.targets is None or len(batch.targets) != n_rows):
        raise DataError(f"{n_rows} loss rows, and targets for {0 if batch.targets is None else len(batch.targets)}")


def _check_pack(batch: MicroBatch, cu_seqlens: Tensor) -> None:
    if batch.tokens.shape[0] != 1 or cu_seqlens.dtype != torch.int32 or cu_seqlens.ndim != 1:
        raise DataError(
            "packed sequences stand in one row, and their borders are a list of int32: tokens "
            f"{list(batch.tokens.shape)}, cu_seqlens {list(cu_seqlens.shape)} {cu_seqlens.dtype}"
        )
    lengths = cu_seqlens.diff()
    ends = (int(cu_seqlens[0]), int(cu_seqlens[-1])) if len(lengths) else None
    if ends != (0, batch.tokens.shape[1]) or int(lengths.min()) < 1:
        raise DataError(
            f"cu_seqlens {cu_seqlens.tolist()} does not ascend from 0 to the {batch.tokens.shape[1]} tokens of the pack"
        )
    columns = torch.arange(batch.tokens.shape[1])
    if not torch.equal(batch.position_ids[0], columns - cu_seqlens[:-1].repeat_interleave(lengths)):
        raise DataError("position_ids do not begin anew at each of cu_seqlens")


def empty_micro_batch() -> MicroBatch:
    """One token without loss, for a rank that has nothing to do and must join the others' collectives."""
    no_ids = torch.zeros(0, dtype=torch.int64)
    return MicroBatch(
        tokens=torch.zeros((1, 1), dtype=torch.int64),
        position_ids=torch.zeros((1, 1), dtype=torch.int64),
        loss_index=no_ids,
        targets=TokenTargets(no_ids, torch.zeros(0), torch.zeros(0, dtype=torch.bool)),
    )
