"""Parts of a training step that both backends share: sums over a global batch, metrics, checks.

The loss of a step is a sum over all loss tokens of the global batch, divided once by their number. Means of
micro-batches or ranks are never averaged, because they have different numbers of tokens.

Letters: B sequences, S columns, N loss rows, V vocabulary, D hidden size of the teacher.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from gkd.config.loss_spec import SFT
from gkd.data.collate import MicroBatches
from gkd.errors import DataError, NumericsError
from gkd.loss.distill_loss import DistillLoss
from gkd.loss.text_units import PAIRED
from gkd.loss.token_loss import (
    END_PROBABILITY,
    ENDED,
    GROUP_SUMS,
    KEPT_SIZE,
    LOSS_SIZE,
    ON_POLICY_VALUES,
    domain_sum,
    turn_sum,
)
from gkd.types import MicroBatch, TokenTargets, TrainStats

_PIECE = 1 << 16  # numbers that are converted at a time, in cache
# Sums over ranks that are numbers of the step as they are: tokens, and seconds divided by the ranks.
IMAGE_SUMS = ("rollout/image_tokens", "perf/image_wait_s")
_NOT_MEANS = ("total", ENDED, LOSS_SIZE, KEPT_SIZE, *IMAGE_SUMS)


@dataclass(frozen=True, slots=True)
class BatchSums:
    """Sums over all loss tokens of the global batch; the same on every rank."""

    n_loss_tokens: int
    n_on_policy: int  # loss tokens that the student generated
    # Names of `DistillLoss.report_names`, and those of `IMAGE_SUMS` if images are read -> sums; "total": loss, nats.
    values: dict[str, float]

    def plus(self, other: BatchSums) -> BatchSums:
        values = {name: value + other.values[name] for name, value in self.values.items()}
        return BatchSums(self.n_loss_tokens + other.n_loss_tokens, self.n_on_policy + other.n_on_policy, values)


def sum_over_group(sums: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return the sum of each rank's `sums` over `group`; the same on all of its ranks.

    Args:
        sums: [...] any device; summed in float64, which counts a billion tokens exactly.
        group: of the ranks that have different ones; None for a single rank.
    """
    total = sums.to(torch.float64)
    if group is not None:
        total = total.clone()
        dist.all_reduce(total, group=group)
    return total


def total_norm(tensors: list[Tensor]) -> Tensor:
    """Return the norm of all tensors together, [] float64 on their device.

    It is summed in float64: offloaded gradients have the norm of those on a GPU, and torch's float32 sum on a CPU errs
    for millions of numbers.
    """
    if not tensors:
        return torch.zeros((), dtype=torch.float64)
    if tensors[0].is_cuda:
        return torch.stack(torch._foreach_norm(tensors, 2, torch.float64)).norm()
    pieces = (piece for tensor in tensors for piece in tensor.flatten().split(_PIECE))
    return torch.stack([piece.double().norm() for piece in pieces]).norm()


def token_mean(token_sum: float, n_loss_tokens: int) -> float:
    """Return `token_sum / n_loss_tokens`, both over the global batch. Raises DataError if there is no loss token."""
    if n_loss_tokens <= 0:
        raise DataError("the global batch has no loss token: all of its responses are empty.")
    return token_sum / n_loss_tokens


def not_finite(step: int, loss: float, grad_norm: float) -> NumericsError | None:
    """Return the error of a step whose loss or gradient norm is not finite; None if both are."""
    if math.isfinite(loss) and math.isfinite(grad_norm):
        return None
    return NumericsError(
        f"step {step}: loss = {loss}, gradient norm = {grad_norm}. The optimizer has not moved. "
        "Fix: lower actor.optim.lr; with reverse_kl, look for tokens to which the teacher assigns probability 0."
    )


def evaluation(step: int, loss: DistillLoss, sums: BatchSums) -> TrainStats:
    """Return the statistics of a forward pass over a global batch.

    Raises:
        NumericsError: the loss is not finite.
        DataError: the batch has no loss token.
    """
    mean = token_mean(sums.values["total"], sums.n_loss_tokens)
    if not math.isfinite(mean):
        raise NumericsError(f"evaluation at step {step}: loss = {mean}")
    return TrainStats(mean, sums.n_loss_tokens, grad_norm=0.0, lr=0.0, extra=diagnostics(loss, sums))


def diagnostics(loss: DistillLoss, sums: BatchSums) -> dict[str, float]:
    """Return the mean of each number over the tokens it is defined for, without those defined for no token."""
    on_policy = {term.name for term in loss.spec.policy_gradients} | ON_POLICY_VALUES
    n_dataset = sums.n_loss_tokens - sums.n_on_policy
    means = {}
    for name, value in sums.values.items():
        n: float = sums.n_on_policy if name in on_policy else n_dataset if name == SFT else sums.n_loss_tokens
        if name == END_PROBABILITY:
            n = sums.values[ENDED]
        if name in ("token_kl", "overlap"):  # 0 where the teacher's tokenizer does not have the text
            n = sums.values.get(PAIRED, n)
        if n and name not in _NOT_MEANS and not name.startswith(("domain/", "turn/")):
            means[f"loss/{name.replace(':', '.')}"] = value / n  # trackers refuse the colon of an import path
    if sums.values.get(LOSS_SIZE):
        means["loss/kept_share"] = sums.values[KEPT_SIZE] / sums.values[LOSS_SIZE]
    means |= {name: sums.values[name] for name in IMAGE_SUMS if name in sums.values}
    return means | domain_numbers(loss.spec.domains, sums.values) | turn_numbers(loss.spec.turns, sums.values)


def domain_numbers(domains: Sequence[str], sums: Mapping[str, float]) -> dict[str, float]:
    """Return the KL to the teacher of each route, and its share of the loss, if the batch has tokens of it."""
    numbers = {}
    for domain in domains:
        n_tokens, kl, total = (sums[domain_sum(domain, name)] for name in GROUP_SUMS)
        if n_tokens and "token_kl" in sums:
            numbers[f"domain/{domain}/token_kl"] = kl / n_tokens
        if sums["total"]:
            numbers[f"domain/{domain}/loss_share"] = total / sums["total"]
    return numbers


def turn_numbers(n_turns: int, sums: Mapping[str, float]) -> dict[str, float]:
    """Return the own tokens of each turn of the trajectories and their KL to the teacher, if the batch has any."""
    numbers = {}
    for turn in range(n_turns):
        n_tokens, kl, _ = (sums[turn_sum(turn, name)] for name in GROUP_SUMS)
        if n_tokens:
            numbers[f"turn/{turn + 1}/tokens"] = n_tokens
        if n_tokens and "token_kl" in sums:
            numbers[f"turn/{turn + 1}/kl"] = kl / n_tokens
    return numbers


def token_counts(batch: MicroBatch, targets: TokenTargets, device: torch.device) -> Tensor:
    """Return [2] float64: loss tokens of a micro-batch, and loss tokens that the student generated."""
    return torch.tensor([batch.n_loss_tokens, int(targets.on_policy.sum())], dtype=torch.float64, device=device)


def check_before(
    loss: DistillLoss, batch: MicroBatch, micro_batches: Sequence[MicroBatch], *, needs_scores: bool = True
) -> None:
    """Check a micro-batch before a forward pass in which other ranks participate.

    Args:
        batch: of `without_targets(micro_batches)`.
        needs_scores: this rank computes the loss. Tables that are built on demand have been checked by
            `gkd.data.batching.check_batch`.

    Raises:
        DataError, NumericsError: training would use wrong tokens or targets, or fail midway.
    """
    needs_scores = needs_scores and not isinstance(micro_batches, MicroBatches)
    check_micro_batch(batch, needs_scores=needs_scores)
    loss.shard.check(batch.tokens)
    if needs_scores and batch.targets is not None:
        loss.check(batch.targets)


def check_micro_batch(batch: MicroBatch, *, needs_scores: bool = True) -> None:
    """Raise DataError if training on `batch` would silently use wrong tokens or targets.

    Args:
        batch: in host memory.
        needs_scores: this rank computes the loss.
    """
    n_rows = batch.n_loss_tokens
    n_positions = batch.tokens.numel()
    if n_rows and not 0 <= int(batch.loss_index.min()) <= int(batch.loss_index.max()) < n_positions:
        raise DataError(f"loss_index is outside of the {n_positions} positions of its micro-batch")
    # Attention is causal over columns and rotary embeddings count columns, of a row or of a packed sequence.
    if batch.cu_seqlens is not None:
        _check_pack(batch, batch.cu_seqlens)
    elif not torch.equal(batch.position_ids, torch.arange(batch.tokens.shape[1]).expand_as(batch.tokens)):
        raise DataError(
            "position_ids are not column indices: without cu_seqlens, sequences must be padded on the right"
        )
    if needs_scores and (batch.targets is None or len(batch.targets) != n_rows):
        n_targets = 0 if batch.targets is None else len(batch.targets)
        raise DataError(f"a micro-batch has {n_rows} loss rows, and targets for {n_targets}")


def with_next_tokens(batch: MicroBatch) -> MicroBatch:
    """Return a micro-batch whose targets are the tokens after its loss rows, which may be in another rank's columns.

    Raises DataError: no token follows the last row.
    """
    n_rows = batch.n_loss_tokens
    if n_rows and int(batch.loss_index.max()) + 1 >= batch.tokens.numel():
        raise DataError("a loss row is the last position of its micro-batch, so no token follows it")
    ids = batch.tokens.flatten()[batch.loss_index + 1]
    return replace(batch, targets=TokenTargets(ids, torch.zeros(n_rows), torch.zeros(n_rows, dtype=torch.bool)))


def _check_pack(batch: MicroBatch, cu_seqlens: Tensor) -> None:
    if batch.tokens.shape[0] != 1 or cu_seqlens.dtype != torch.int32 or cu_seqlens.ndim != 1:
        raise DataError(
            "packed sequences must be one row, with cu_seqlens a list of int32: tokens "
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
        raise DataError("position_ids do not restart at each of cu_seqlens")


def empty_micro_batch() -> MicroBatch:
    """Return a micro-batch of one token without loss, for a rank without work that must join the collectives."""
    no_ids = torch.zeros(0, dtype=torch.int64)
    return MicroBatch(
        tokens=torch.zeros((1, 1), dtype=torch.int64),
        position_ids=torch.zeros((1, 1), dtype=torch.int64),
        loss_index=no_ids,
        targets=TokenTargets(no_ids, torch.zeros(0), torch.zeros(0, dtype=torch.bool)),
    )
