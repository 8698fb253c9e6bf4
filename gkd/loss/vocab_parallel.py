"""Compute student logprobs of chosen ids from logits that are split over tensor-parallel ranks.

    logprob[n, c] = z[n, ids[n, c]] - log sum_v exp(z[n, v]),      z = logits / temperature

and the log probability of all tokens outside a list of ids. The results go to `gkd.loss.token_loss`.

The sum covers the model's true vocabulary: rows that only pad the vocabulary to a multiple of TP are
excluded and get a gradient of exactly zero. No tensor of size [N, V] exists except the logits and their
gradient: both passes process pieces of rows (`gkd.loss.row_kernels`), and the second recomputes the softmax.

Letters: N loss rows, C ids per row, V_local vocabulary columns of this rank (padding included), TP ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from gkd.errors import NumericsError
from gkd.loss.row_kernels import RowGradient, RowKernels, statistics_dtype


@dataclass(frozen=True, slots=True)
class VocabShard:
    """The part of the vocabulary that this rank's logits cover."""

    start: int  # global id of local column 0
    n_valid: int  # size of the true, unpadded vocabulary
    group: dist.ProcessGroup | None  # ranks that hold the other parts; None: this rank holds all of it

    def n_columns(self, v_local: int) -> int:
        """Return the number of this rank's columns that are not padding; may be 0."""
        return min(max(self.n_valid - self.start, 0), v_local)

    def columns(self, ids: Tensor, v_local: int) -> Tensor:
        """Return the local columns (int64) of global ids; -1 for an id of another rank and for -1."""
        local = ids - self.start
        return torch.where((ids >= 0) & (local >= 0) & (local < self.n_columns(v_local)), local, -1)

    def check(self, ids: Tensor) -> None:
        """Raise NumericsError for an id outside the vocabulary."""
        if ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= self.n_valid):
            raise NumericsError(
                f"token ids span [{int(ids.min())}, {int(ids.max())}], outside the student's vocabulary of "
                f"{self.n_valid} tokens. The teacher and the student do not share a tokenizer; check both."
            )


class RowLogprobs(NamedTuple):
    """Results over the whole vocabulary for each row; equal on all ranks of the shard's group."""

    logprobs: Tensor  # [N, C] nats; undefined where the id is -1
    tail: Tensor  # [N] log of the total probability outside the list; -inf if no token is outside
    entropy: Tensor  # [N] nats, without gradient
    log_normalizer: Tensor  # [N] log sum_v exp(z), without gradient


def row_logprobs(
    logits_local: Tensor, ids: Tensor, shard: VocabShard, *, kernels: RowKernels, n_listed: int, temperature: float
) -> RowLogprobs:
    """Return the log-softmax over the whole vocabulary at `ids`, in float32 (float64 for float64 logits).

    One all-reduce of [N, 2 TP + C] numbers over `shard.group`. `write_logits_gradient` has the gradient.

    Args:
        logits_local: [N, V_local] any float dtype, this rank's slice of the vocabulary. The listed ones are masked
            temporarily, so they must not be read concurrently.
        ids: [N, C] int64 global token ids in the vocabulary, the same on every rank of the group; -1 = none.
        n_listed: the first `n_listed` ids of a row are a list of distinct ids, and `tail` covers the tokens outside
            it. The tail is summed over those tokens, because 1 - sum of the list has no significant digit if the list
            holds nearly all mass. The other ids may repeat one another and the list.
        temperature: divides the logits; > 0.
    """
    v_local = logits_local.shape[1]
    valid = logits_local[:, : shard.n_columns(v_local)]
    columns = shard.columns(ids, v_local)
    log_sum, mean, picked = local_statistics(
        valid, columns, kernels=kernels, n_masked=n_listed, temperature=temperature
    )
    log_sums, means, picked = sum_over_shards(shard, [log_sum, mean], picked)
    # These sums exclude the listed tokens. Add each of those as one more part.
    listed = picked[:, :n_listed].masked_fill(ids[:, :n_listed] < 0, -torch.inf)
    log_masses = torch.cat([log_sums, listed], dim=1)
    log_normalizer = log_masses.logsumexp(dim=-1)
    means = torch.cat([means, listed.masked_fill(listed == -torch.inf, 0.0)], dim=1)
    # Sum the distances from the normalizer: the shares sum to 1 only up to rounding, which large logits would amplify.
    shares = (log_masses - log_normalizer[:, None]).exp()
    entropy = (shares * (log_normalizer[:, None] - means)).sum(dim=-1)
    tail = log_sums.logsumexp(dim=-1) - log_normalizer
    return RowLogprobs(picked - log_normalizer[:, None], tail, entropy, log_normalizer)


def local_statistics(
    valid: Tensor, columns: Tensor, *, kernels: RowKernels, n_masked: int = 0, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return this rank's [N] log-sum-exp, [N] mean logit, and [N, C] z at the columns (0 for -1), z = valid / T.

    The first two exclude the first `n_masked` columns of each row.
    """
    dtype = statistics_dtype(valid)
    n_rows, v_valid = valid.shape
    if not (v_valid and n_rows):  # a shard of only padding has no mass
        empty = torch.zeros(n_rows, dtype=dtype, device=valid.device)
        return empty - torch.inf, empty, torch.zeros(columns.shape, dtype=dtype, device=valid.device)
    picked = valid.gather(1, columns.clamp(min=0)).to(dtype) / temperature
    with columns_without_mass(valid, columns[:, :n_masked]) if n_masked else nullcontext():
        log_sum, mean = kernels.statistics(valid, temperature)
    return log_sum, mean, picked.masked_fill(columns < 0, 0.0)


def sum_over_shards(shard: VocabShard, local: list[Tensor], summed: Tensor) -> list[Tensor]:
    """Gather `local` and sum `summed` over the ranks of a shard's group in one all-reduce.

    Args:
        local: [N] tensors to gather.
        summed: [N, C] to sum.

    Returns:
        A [N, TP] tensor for each of `local`, columns in rank order, and the sum [N, C].
    """
    if shard.group is None:
        return [*(t[:, None] for t in local), summed]
    size = dist.get_world_size(shard.group)
    rank = dist.get_rank(shard.group)
    # A slot per rank and number, zero on all other ranks, turns the sum into a gather.
    slots = summed.new_zeros((len(summed), len(local), size))
    slots[:, :, rank] = torch.stack(local, dim=1)
    message = torch.cat([slots.flatten(1), summed], dim=1)
    dist.all_reduce(message, group=shard.group)
    *slotted, total = message.split([size] * len(local) + [summed.shape[1]], dim=1)
    return [*slotted, total]


def write_logits_gradient(
    logits_local: Tensor,
    out: Tensor,
    ids: Tensor,
    rows: RowLogprobs,
    shard: VocabShard,
    *,
    grad_logprobs: Tensor,
    grad_tail: Tensor,
    kernels: RowKernels,
    n_listed: int,
    temperature: float,
) -> None:
    """Write d loss / d logits [N, V_local] to `out`, which may be the logits.

    With g the gradient of each logprob, g_t that of the tail, t its probability and G = sum g + g_t,

        d loss / d z_v = g_v - G q_v             for v in the list
                         (g_t - G t) q_v / t     for v in the tail (plus g of the other ids that are v)

    Args:
        rows: result of `row_logprobs` for `ids` and `n_listed`.
        grad_logprobs: [N, C]; ignored where the id is -1.
        grad_tail: [N].
    """
    v_valid = shard.n_columns(logits_local.shape[1])
    if v_valid and len(logits_local):
        columns = shard.columns(ids, logits_local.shape[1])
        grad = grad_logprobs.masked_fill(ids < 0, 0.0)
        grad_tail = grad_tail if n_listed else torch.zeros_like(grad_tail)
        grad_sum = grad.sum(dim=-1) + grad_tail
        has_tail = rows.tail > -torch.inf
        by = RowGradient(
            columns[:, n_listed:],
            grad[:, n_listed:],
            row_grad=grad_sum * rows.tail.exp() - grad_tail,
            # q_v / t; it may overflow for v in the list, but those are overwritten below.
            log_normalizer=rows.log_normalizer + torch.where(has_tail, rows.tail, 0.0),
            temperature=temperature,
        )
        kernels.write_gradient(logits_local[:, :v_valid], out[:, :v_valid], by)
        if n_listed:
            listed = ids[:, :n_listed]
            other_ids = ids[:, n_listed:]
            at_list = grad[:, :n_listed] - grad_sum[:, None] * rows.logprobs[:, :n_listed].exp()
            for i in range(other_ids.shape[1]):  # few: only the sampled token
                at_list = at_list + torch.where(listed == other_ids[:, i : i + 1], grad[:, n_listed + i, None], 0.0)
            set_columns(out[:, :v_valid], columns[:, :n_listed], at_list / temperature)
    # This write is needed without padding, too: it increments the logits' version counter, which kernels do not.
    out[:, v_valid:] = 0.0


@contextmanager
def columns_without_mass(logits: Tensor, columns: Tensor) -> Iterator[None]:
    """Within the block, set `columns` [n, K] of `logits` [n, v] to -inf; restore them bit-exactly at the end.

    Column -1 means none. A scatter needs equally long rows, so -1 is written to column 0, and column 0 is restored
    afterwards. This avoids a device synchronization to count the valid entries.

    Letters: n rows, v columns, K chosen columns per row, distinct except for -1.

    The version counter does not change, so autograd accepts logits that were saved for a backward pass.
    """
    index = columns.clamp(min=0)
    first = logits[:, 0].clone()
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
    is_first = columns == 0
    first = out[:, 0].clone()
    # All writes to column 0 have the same value, so their order does not matter.
    at_first = torch.where(is_first, values, 0.0).sum(dim=-1, keepdim=True)
    out.scatter_(1, columns.clamp(min=0), torch.where(columns < 0, at_first, values).to(out.dtype))
    out[:, 0] = torch.where(is_first.any(dim=-1), at_first[:, 0].to(out.dtype), first)
