"""Student logprobs of chosen ids, from logits split over tensor-parallel ranks.

Road of one batch: the step between the student's LM head and the tables of `gkd.loss.token_loss`.

    logprob[n, c] = z[n, ids[n, c]] - log sum_v exp(z[n, v]),      z = logits / temperature

and the log probability of all tokens that a list of ids leaves out.

The vocabulary of the sum is the model's true one: rows that exist only because the vocabulary was
padded to a multiple of TP take no part in it and get a gradient of exactly zero. Nothing of size
[N, V] is kept or made beside the logits and their gradient: both passes walk over pieces of rows
(`gkd.loss.row_kernels`), and the backward pass computes the softmax again.

Letters: N loss rows, C ids a row, V_local vocabulary columns of this rank (padding included), TP ranks.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from gkd.errors import NumericsError
from gkd.loss.columns import columns_without_mass, set_columns
from gkd.loss.row_kernels import RowKernels, statistics_dtype


@dataclass(frozen=True, slots=True)
class VocabShard:
    """Which part of the vocabulary this rank's logits are about."""

    start: int  # global id of local column 0
    n_valid: int  # size of the true, unpadded vocabulary
    group: dist.ProcessGroup | None  # ranks that hold the other parts; None: this one holds all

    def n_columns(self, v_local: int) -> int:
        """Columns of this rank that are no padding; 0 on a rank that holds nothing else."""
        return min(max(self.n_valid - self.start, 0), v_local)

    def columns(self, ids: Tensor, v_local: int) -> Tensor:
        """Global ids -> local columns, int64; -1 for an id of another rank and for -1."""
        local = ids - self.start
        return torch.where((ids >= 0) & (local >= 0) & (local < self.n_columns(v_local)), local, -1)

    def check(self, ids: Tensor, *, lowest: int = 0) -> None:
        """Raises NumericsError for an id that is not in the vocabulary; with `lowest` -1, neither that nor -1."""
        if ids.numel() and (int(ids.min()) < lowest or int(ids.max()) >= self.n_valid):
            raise NumericsError(
                f"token ids span [{int(ids.min())}, {int(ids.max())}], outside the student's vocabulary of "
                f"{self.n_valid} tokens. The teacher and the student do not share a tokenizer; check both."
            )


class RowLogprobs(NamedTuple):
    """What the vocabulary tells about each row; equal on all ranks of the shard's group."""

    logprobs: Tensor  # [N, C] nats; where an id is -1 it means nothing
    tail: Tensor  # [N] log probability of all tokens that are not listed; -inf if there is none
    entropy: Tensor  # [N] nats, without gradient
    log_normalizer: Tensor  # [N] log sum_v exp(z), without gradient


def vocab_parallel_logprobs(
    logits_local: Tensor,
    ids: Tensor,
    shard: VocabShard,
    *,
    kernels: RowKernels,
    n_listed: int = 0,
    temperature: float = 1.0,
    overwrite_logits: bool = False,
    check_ids: bool = True,
) -> RowLogprobs:
    """Log-softmax over the whole vocabulary, picked at `ids`; differentiable in `logits_local`.

    One all-reduce over `shard.group`, of [N, 2 TP + C] numbers, in the forward pass; the backward pass is local.

    Args:
        logits_local: [N, V_local] any float dtype, this rank's slice of the vocabulary. For a moment of the forward
            pass the listed ones are replaced, so nobody may read them meanwhile.
        ids: [N, C] int64 global token ids, the same on every rank of the group; -1 = none.
        n_listed: the first ids, distinct in each row, are a list, and `tail` is what it leaves: summed up from the
            tokens outside, since 1 - sum of the list keeps no digit where the list holds nearly everything. The other
            ids may repeat one another and the list.
        temperature: divides the logits; > 0.
        overwrite_logits: the backward pass writes the gradient over the logits. They must have no other use; autograd
            raises RuntimeError if they do, or at a second backward pass.
        check_ids: False for ids that have been checked already: on a GPU the check waits for the device.

    Returns:
        float32 tensors (float64 for float64 logits).

    Raises:
        NumericsError: an id is outside the vocabulary.
    """
    if check_ids:
        shard.check(ids, lowest=-1)
    return RowLogprobs(*_Logprobs.apply(logits_local, ids, shard, kernels, n_listed, temperature, overwrite_logits))


class _Logprobs(torch.autograd.Function):
    """See `row_logprobs` and `write_logits_gradient`."""

    @staticmethod
    def forward(
        ctx: Any,
        logits_local: Tensor,
        ids: Tensor,
        shard: VocabShard,
        kernels: RowKernels,
        n_listed: int,
        temperature: float,
        overwrite_logits: bool,
    ) -> tuple[Tensor, ...]:
        logits = logits_local.detach()
        rows = row_logprobs(logits, ids, shard, kernels=kernels, n_listed=n_listed, temperature=temperature)
        ctx.save_for_backward(logits_local, ids, *rows)
        ctx.shard, ctx.kernels, ctx.n_listed = shard, kernels, n_listed
        ctx.temperature, ctx.overwrite = temperature, overwrite_logits
        ctx.mark_non_differentiable(rows.entropy, rows.log_normalizer)
        return tuple(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        logits_local, ids, *rows = ctx.saved_tensors
        grad = logits_local.detach() if ctx.overwrite else torch.empty_like(logits_local)
        write_logits_gradient(
            logits_local,
            grad,
            ids,
            RowLogprobs(*rows),
            ctx.shard,
            grad_logprobs=grad_outputs[0],
            grad_tail=grad_outputs[1],
            kernels=ctx.kernels,
            n_listed=ctx.n_listed,
            temperature=ctx.temperature,
        )
        return grad, None, None, None, None, None, None


def row_logprobs(
    logits_local: Tensor, ids: Tensor, shard: VocabShard, *, kernels: RowKernels, n_listed: int, temperature: float
) -> RowLogprobs:
    """`vocab_parallel_logprobs` without a gradient."""
    v_local = logits_local.shape[1]
    valid, columns = logits_local[:, : shard.n_columns(v_local)], shard.columns(ids, v_local)
    log_sum, mean, picked = local_statistics(
        valid, columns, kernels=kernels, n_hidden=n_listed, temperature=temperature
    )
    log_sums, means, picked = sum_over_shards(shard, [log_sum, mean], picked)
    # The tokens of the list are not in these sums, but each as a shard of its own.
    listed = picked[:, :n_listed].masked_fill(ids[:, :n_listed] < 0, -torch.inf)
    parts = torch.cat([log_sums, listed], dim=1)
    log_normalizer = parts.logsumexp(dim=-1)
    means = torch.cat([means, listed.masked_fill(listed == -torch.inf, 0.0)], dim=1)
    # Each part's distance from the normalizer: the shares sum to 1 only up to rounding, and large logits would show it.
    shares = (parts - log_normalizer[:, None]).exp()
    entropy = (shares * (log_normalizer[:, None] - means)).sum(dim=-1)
    tail = log_sums.logsumexp(dim=-1) - log_normalizer
    return RowLogprobs(picked - log_normalizer[:, None], tail, entropy, log_normalizer)


def local_statistics(
    valid: Tensor, columns: Tensor, *, kernels: RowKernels, n_hidden: int = 0, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """This rank's ([N] log-sum-exp, [N] mean logit, [N, C] z at the columns, 0 where that is -1), z = valid / T.

    The first two leave out the first `n_hidden` columns of each row.
    """
    dtype = statistics_dtype(valid)
    n_rows, v_valid = valid.shape
    if not (v_valid and n_rows):  # a shard that is all padding has no mass
        empty = torch.zeros(n_rows, dtype=dtype, device=valid.device)
        return empty - torch.inf, empty, torch.zeros(columns.shape, dtype=dtype, device=valid.device)
    picked = valid.gather(1, columns.clamp(min=0)).to(dtype) / temperature
    with columns_without_mass(valid, columns[:, :n_hidden]) if n_hidden else nullcontext():
        log_sum, mean = kernels.statistics(valid, temperature)
    return log_sum, mean, picked.masked_fill(columns < 0, 0.0)


def sum_over_shards(shard: VocabShard, own: list[Tensor], summed: Tensor) -> list[Tensor]:
    """One all-reduce for numbers that add up over the ranks and numbers that each rank has its own of.

    Args:
        own: [N] tensors; every rank's is wanted.
        summed: [N, C].

    Returns:
        A [N, TP] tensor for each of `own`, columns in rank order, and the sum [N, C].
    """
    if shard.group is None:
        return [*(t[:, None] for t in own), summed]
    size, rank = dist.get_world_size(shard.group), dist.get_rank(shard.group)
    # A slot for each rank and number, zero on all ranks but one, makes a sum do a gather's work.
    slots = summed.new_zeros((len(summed), len(own), size))
    slots[:, :, rank] = torch.stack(own, dim=1)
    message = torch.cat([slots.flatten(1), summed], dim=1)
    dist.all_reduce(message, group=shard.group)
    *slotted, total = message.split([size] * len(own) + [summed.shape[1]], dim=1)
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
    """Writes d loss / d logits [N, V_local] to `out`, which may be the logits.

    With g the gradient of each logprob, g_t that of the tail, t its probability and G = sum g + g_t,

        d loss / d z_v = g_v - G q_v             of the list
                         (g_t - G t) q_v / t     of the tail (where some of the other ids may add their g)

    Args:
        rows: what `row_logprobs` gave for `ids` and `n_listed`.
        grad_logprobs: [N, C]; what it says of an id -1 is not used.
        grad_tail: [N].
    """
    v_valid = shard.n_columns(logits_local.shape[1])
    if v_valid and len(logits_local):
        columns = shard.columns(ids, logits_local.shape[1])
        grad = grad_logprobs.masked_fill(ids < 0, 0.0)
        grad_tail = grad_tail if n_listed else torch.zeros_like(grad_tail)
        grad_sum = grad.sum(dim=-1) + grad_tail
        has_tail = rows.tail > -torch.inf
        kernels.write_gradient(
            logits_local[:, :v_valid],
            out[:, :v_valid],
            columns=columns[:, n_listed:],
            column_grad=grad[:, n_listed:],
            row_grad=grad_sum * rows.tail.exp() - grad_tail,
            # q_v / t; of the list it may overflow, and that is replaced.
            log_normalizer=rows.log_normalizer + torch.where(has_tail, rows.tail, 0.0),
            temperature=temperature,
        )
        if n_listed:
            listed, others = ids[:, :n_listed], ids[:, n_listed:]
            at_list = grad[:, :n_listed] - grad_sum[:, None] * rows.logprobs[:, :n_listed].exp()
            for i in range(others.shape[1]):  # few: the sampled token
                at_list = at_list + torch.where(listed == others[:, i : i + 1], grad[:, n_listed + i, None], 0.0)
            set_columns(out[:, :v_valid], columns[:, :n_listed], at_list / temperature)
    # Also without padding: this is what tells autograd that logits were overwritten; a kernel's own writes do not.
    out[:, v_valid:] = 0.0
