"""Compute losses over the whole vocabulary for a chunk of rows, from logits of student and teacher.

Every divergence is a sum over tokens of f(log p_v, log q_v), so a rank sums its own columns, and with
g_v = d loss / d log q_v the gradient in z = logits / temperature is

    d loss / d z_v = g_v - q_v sum_u g_u

Two all-reduces per chunk: one for the normalizers of both sides, one for the sums. The elementwise part
(`gkd.loss.divergence_slopes`) processes pieces that fit the cache.

Letters: n rows of the chunk, v vocabulary columns of this rank (no padding).
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from gkd.config.loss_spec import LossSpec
from gkd.loss.choices import full_vocab_choices
from gkd.loss.divergence_slopes import forward_kl, value_and_slope
from gkd.loss.row_kernels import RowKernels, SoftmaxShare, pieces
from gkd.loss.token_loss import PLAIN, TokenLosses, add_divergences, sampled_losses_and_slope
from gkd.loss.vocab_parallel import VocabShard, local_statistics, sum_over_shards
from gkd.types import TokenTargets


def full_vocab_losses(
    logits: Tensor,
    teacher_logits: Tensor,
    targets: TokenTargets,
    spec: LossSpec,
    shard: VocabShard,
    *,
    kernels: RowKernels,
    with_grad: bool,
    with_choices: bool = False,
) -> TokenLosses:
    """Return the losses of a chunk; with `with_grad`, overwrite `logits` with d sum(total) / d logits.

    Args:
        logits: [n, v] the student's, any float dtype.
        teacher_logits: [n, v] float32 (float64 for float64 logits), already divided by the temperature; overwritten.
        targets: of these rows; the teacher's tables in it are not read, the reference's logprobs are.
        with_choices: set `TokenLosses.choices`; the same on all ranks of the shard's group.

    Returns:
        Losses without gradient.
    """
    temperature = spec.temperature
    columns = shard.columns(targets.sampled_ids[:, None], logits.shape[1])
    log_sum_q, mean_q, picked_q = local_statistics(logits, columns, kernels=kernels, temperature=temperature)
    log_sum_p, _, picked_p = local_statistics(teacher_logits, columns, kernels=kernels, temperature=1.0)
    picked = torch.cat([picked_q, picked_p], dim=1)
    log_sums_q, means_q, log_sums_p, picked = sum_over_shards(shard, [log_sum_q, mean_q, log_sum_p], picked)
    norm_q = log_sums_q.logsumexp(dim=-1)
    norm_p = log_sums_p.logsumexp(dim=-1)

    losses, slope = sampled_losses_and_slope(spec, targets, picked[:, 0] - norm_q, picked[:, 1] - norm_p)
    if with_choices:
        losses.choices = full_vocab_choices(logits, teacher_logits, norm_q, norm_p, temperature, shard)

    sums, g = _divergence_sums(logits, teacher_logits, norm_q, norm_p, spec, with_grad=with_grad)
    if shard.group is not None:
        dist.all_reduce(sums, group=shard.group)
    divergences = torch.zeros_like(losses.total)
    for i, term in enumerate(spec.divergences):
        divergences = divergences + term.weight * sums[:, i]
        losses.values[term.name] = sums[:, i]
    clipped = add_divergences(losses, spec, divergences)
    if spec.token_clip:
        g.masked_fill_(clipped[:, None], 0.0)
        sums[clipped, -1] = 0.0
    token_kl, overlap, g_sum = sums[:, -3:].unbind(dim=1)
    losses.values["token_kl"] = token_kl
    losses.values["overlap"] = overlap
    shares = (log_sums_q - norm_q[:, None]).exp()
    losses.values["student_entropy"] = (shares * (norm_q[:, None] - means_q)).sum(dim=-1)
    if with_grad and logits.numel():  # empty on a rank that holds only padding
        _write_gradient(logits, g, columns, slope, g_sum + slope, norm_q, temperature)
    return losses


def _divergence_sums(
    logits: Tensor, teacher_logits: Tensor, norm_q: Tensor, norm_p: Tensor, spec: LossSpec, *, with_grad: bool
) -> tuple[Tensor, Tensor]:
    """Return this rank's [n, D + 3] sums (D divergences, forward KL, overlap, g) and g [n, v], in `teacher_logits`."""
    terms = [(term, value_and_slope(term.name)) for term in spec.divergences]
    sums = norm_q.new_zeros((len(norm_q), len(terms) + 3))
    for rows in pieces(logits):
        log_p = teacher_logits[rows].sub_(norm_p[rows, None])
        log_q = (logits[rows].to(norm_q.dtype) / spec.temperature).sub_(norm_q[rows, None])
        sums[rows, -3] = forward_kl(log_q, log_p, PLAIN)[0]
        sums[rows, -2] = torch.minimum(log_p, log_q).exp_().sum(dim=-1)
        g = torch.zeros_like(log_q)
        for i, (term, divergence) in enumerate(terms):
            sums[rows, i], slope = divergence(log_q, log_p, term)
            g.add_(slope, alpha=term.weight)
        if with_grad:
            sums[rows, -1] = g.sum(dim=-1)
            teacher_logits[rows] = g
    return sums, teacher_logits


def _write_gradient(
    logits: Tensor, g: Tensor, columns: Tensor, slope: Tensor, row_grad: Tensor, norm_q: Tensor, temperature: float
) -> None:
    """Set logits = (g + slope at the sampled column - row_grad * softmax) / temperature, summed in float32."""
    index = columns.clamp(min=0)
    added = slope[:, None].masked_fill(columns < 0, 0.0) / temperature
    plain = temperature == 1.0 and logits.dtype == g.dtype and logits.is_contiguous()
    share = SoftmaxShare(logits)
    scaled = None if plain else torch.empty_like(share.zeros)
    for rows in pieces(logits):
        z = logits[rows] if scaled is None else scaled[: rows.stop - rows.start].copy_(logits[rows]).div_(temperature)
        share.write(z, z, row_grad[rows] / -temperature, norm_q[rows])
        z.add_(g[rows], alpha=1.0 / temperature).scatter_add_(1, index[rows], added[rows])
        if scaled is not None:
            logits[rows] = z
