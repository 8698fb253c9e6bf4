"""Student logprobs of the teacher's top-k ids, from logits split over tensor-parallel ranks.

Road of one batch: the step between the student's LM head and the divergence.

    logprob[n, k] = z[n, ids[n, k]] - log sum_v exp(z[n, v]),      z = logits / temperature

The vocabulary of the sum is the model's true one: rows that exist only because the vocabulary was
padded to a multiple of TP take no part in it and get a gradient of exactly zero. Nothing of size
[N, V] is kept in float32: both passes walk over chunks of rows.

Letters: N loss rows, K top-k entries, V_local vocabulary rows of this rank (padding included),
V_valid those of them that are real.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gkd.errors import NumericsError

# Float32 working memory of one chunk: 2^25 elements = 128 MiB.
_CHUNK_ELEMENTS = 1 << 25


def vocab_parallel_topk_logprobs(
    logits_local: Tensor,
    ids: Tensor,
    *,
    vocab_start: int,
    n_valid_vocab: int,
    tp_group: dist.ProcessGroup | None,
    temperature: float = 1.0,
) -> Tensor:
    """Log-softmax over the whole vocabulary, picked at `ids`; differentiable in `logits_local`.

    Collective over `tp_group` in the forward pass (one max, one sum); the backward pass is local.

    Args:
        logits_local: [N, V_local] any float dtype, this rank's slice of the vocabulary.
        ids: [N, K] int64 global token ids, the same on every rank of `tp_group`; repeats allowed.
        vocab_start: global id of this rank's row 0.
        n_valid_vocab: size of the true, unpadded vocabulary.
        tp_group: ranks that hold the other slices; None if this rank holds all of it.
        temperature: divides the logits; > 0.

    Returns:
        [N, K] float32 (float64 for float64 logits), nats, equal on every rank of `tp_group`.

    Raises:
        NumericsError: an id is outside [0, n_valid_vocab).
    """
    if ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= n_valid_vocab):
        raise NumericsError(
            f"top-k ids span [{int(ids.min())}, {int(ids.max())}], outside the student's vocabulary of "
            f"{n_valid_vocab} tokens. The teacher and the student do not share a tokenizer; check both."
        )
    logprobs: Tensor = _TopkLogprobs.apply(logits_local, ids, vocab_start, n_valid_vocab, tp_group, temperature)
    return logprobs


class _TopkLogprobs(torch.autograd.Function):
    """Forward and exact gradient; see `vocab_parallel_topk_logprobs`.

    d logprob[n, k] / d z[n, v] = 1[v == ids[n, k]] - softmax(z)[n, v]
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits_local: Tensor,
        ids: Tensor,
        vocab_start: int,
        n_valid_vocab: int,
        tp_group: dist.ProcessGroup | None,
        temperature: float,
    ) -> Tensor:
        n_rows, v_local = logits_local.shape
        v_valid = min(max(n_valid_vocab - vocab_start, 0), v_local)  # 0: a shard that is all padding
        stat_dtype = torch.float64 if logits_local.dtype == torch.float64 else torch.float32
        valid = logits_local[:, :v_valid]  # [N, V_valid], a view

        if v_valid:
            row_max = valid.amax(dim=-1).to(stat_dtype) / temperature  # [N]; max is exact in any dtype
        else:
            row_max = torch.full((n_rows,), -torch.inf, dtype=stat_dtype, device=logits_local.device)
        if tp_group is not None:
            dist.all_reduce(row_max, op=dist.ReduceOp.MAX, group=tp_group)

        in_shard = (ids >= vocab_start) & (ids < vocab_start + v_valid)  # [N, K]
        local_ids = torch.where(in_shard, ids - vocab_start, 0)
        sums = torch.zeros((n_rows, 1 + ids.shape[1]), dtype=stat_dtype, device=logits_local.device)
        if v_valid:
            for rows in _row_chunks(n_rows, v_valid):
                # The division makes the copy that the in-place steps need: .to() may return the logits.
                shifted = (valid[rows].to(stat_dtype) / temperature).sub_(row_max[rows, None])
                picked = shifted.gather(1, local_ids[rows])
                sums[rows, 1:] = torch.where(in_shard[rows], picked, 0.0)
                sums[rows, 0] = shifted.exp_().sum(dim=-1)
        if tp_group is not None:
            # Each picked logit lives on one rank and is 0 on the others, so the sum that joins the
            # exponentials also fetches it, exactly.
            dist.all_reduce(sums, op=dist.ReduceOp.SUM, group=tp_group)

        log_sum_exp = sums[:, 0].log()  # [N], relative to row_max
        ctx.save_for_backward(logits_local, local_ids, in_shard, row_max + log_sum_exp)
        ctx.v_valid, ctx.temperature = v_valid, temperature
        return sums[:, 1:] - log_sum_exp[:, None]

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (grad_logprobs,) = grad_outputs  # [N, K]
        logits_local, local_ids, in_shard, log_normalizer = ctx.saved_tensors
        v_valid, temperature = ctx.v_valid, ctx.temperature
        grad = torch.zeros_like(logits_local)  # padded columns stay zero
        if v_valid:
            # Ids of other shards share placeholder column 0: masked to zero *and* accumulated, so
            # that neither they nor a real id 0 beside them is lost to a plain scatter.
            picked_grad = torch.where(in_shard, grad_logprobs, 0.0)  # [N, K]
            row_grad = grad_logprobs.sum(dim=-1)  # [N], over the ids of all shards
            for rows in _row_chunks(len(logits_local), v_valid):
                scaled = logits_local[rows, :v_valid].to(log_normalizer.dtype) / temperature
                chunk = scaled.sub_(log_normalizer[rows, None]).exp_().mul_(-row_grad[rows, None])
                chunk.scatter_add_(1, local_ids[rows], picked_grad[rows])
                grad[rows, :v_valid] = chunk.div_(temperature)
        return grad, None, None, None, None, None


def _row_chunks(n_rows: int, n_columns: int) -> list[slice]:
    """Slices over the rows such that one chunk of [rows, n_columns] stays near `_CHUNK_ELEMENTS`."""
    step = max(1, _CHUNK_ELEMENTS // max(n_columns, 1))
    return [slice(start, min(start + step, n_rows)) for start in range(0, n_rows, step)]
