"""Weigh the tokens of each sequence by what the student can learn from them: distill.token_weight, distill.token_share.

q is the student, p the teacher, y the response token, a = log q(y) - log p(y) (0 where the student did not sample it),
R the number of tokens of the sequence that carry loss. The factor of a token is computed from

    entropy        u = H(q)                                                              TIP, arXiv:2604.14084
    teachability   u = n(KL(p || q)) n(sum of p over the student's 16 most probable)     TA-OPD, arXiv:2605.26844
    position       u = 1 + 0.5 (1 - sum_{s<t} |a_s| / sum_{s<R} |a_s|)                   IW-OPD, arXiv:2606.22600

where n maps the 5% and the 95% quantile of the sequence to 0 and 1, and clips; it is 1 if they are closer than 1e-6.
The ceil(token_share R) tokens with the largest u are kept, ties in the order of the response. Their factors are
R u / (sum of u over them), so that they are 1 on average over the sequence: its part of the batch's loss is the same as
without. If u is 0 on all of them they are equal. Other tokens have the factor 0.

A sequence is in one micro-batch, so neither micro-batches, packing nor data-parallel groups change the factors; all
tensor-parallel ranks compute them from the same numbers. Context-parallel ranks gather the numbers of whole sequences.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from fractions import Fraction

import torch
from torch import Tensor

from gkd.config.loss_spec import LossSpec
from gkd.data.columns import Columns
from gkd.loss.row_kernels import pieces, statistics_dtype
from gkd.loss.token_loss import SUPPORT_MASS
from gkd.loss.vocab_parallel import RowLogprobs, VocabShard, sum_over_shards
from gkd.types import TokenTargets

N_SUPPORT = 16  # K of TA-OPD
LOW = 0.05  # quantiles of TA-OPD
HIGH = 0.95
LEAST_RANGE = 1e-6  # below, the differences are rounding errors, which dividing by their range would make factors
GAIN = 0.5  # gamma of IW-OPD


def with_token_weights(
    targets: TokenTargets, spec: LossSpec, values: Mapping[str, Tensor], columns: Columns
) -> TokenTargets:
    """Return the targets with the factors of their tokens, in addition to those they have.

    Args:
        targets: N rows, with their sequences.
        values: [N] each, by the names of `gkd.loss.token_loss.report_names`, without gradient.
        columns: of this rank; the call is a collective over the ranks that share the micro-batch.
    """
    assert targets.sequences is not None  # checked
    needed = [values[name] for name in NEEDS[spec.token_weight]]
    local_rows = targets.sequences.cpu(), torch.stack(needed, dim=1).double().cpu()
    gathered = columns.gather(local_rows)
    sequences, table = (torch.cat(tensors) for tensors in zip(*gathered, strict=True))
    # A sequence's rows are in the order of the ranks; padded, each rank has rows of all sequences.
    order = sequences.argsort(stable=True)
    _, lengths = sequences[order].unique_consecutive(return_counts=True)
    factors = torch.zeros(len(order), dtype=torch.float64)
    for indices in order.split(lengths.tolist()):
        factors[indices] = _factors(RAW[spec.token_weight](*table[indices].T), spec.token_share)
    first = sum(len(rows) for rows, _ in gathered[: columns.rank])
    factors = factors[first : first + len(targets)].to(needed[0].dtype)
    return replace(targets, weights=factors if targets.weights is None else targets.weights.cpu() * factors)


def _factors(raw: Tensor, share: float) -> Tensor:
    """Return the factors of a sequence's tokens from [R] float64 weights >= 0."""
    n_kept = math.ceil(Fraction(repr(share)) * len(raw))
    kept = torch.zeros_like(raw)
    kept[raw.argsort(descending=True, stable=True)[:n_kept]] = 1.0
    total = (raw * kept).sum()
    return len(raw) * (raw * kept / total if total > 0 else kept / n_kept)


def _position(log_ratio: Tensor) -> Tensor:
    before = torch.cat([log_ratio.new_zeros(1), log_ratio.abs().cumsum(0)[:-1]])
    return 1.0 + GAIN * (1.0 - before / before[-1] if before[-1] > 0 else torch.ones_like(before))


def _normed(values: Tensor) -> Tensor:
    low = values.quantile(LOW)
    high = values.quantile(HIGH)
    if high - low < LEAST_RANGE:
        return torch.ones_like(values)
    return ((values - low) / (high - low)).clamp(0.0, 1.0)


RAW: dict[str, Callable[..., Tensor]] = {
    "entropy": lambda entropy: entropy.clamp(min=0.0),  # may be negative by rounding
    "teachability": lambda kl, support_mass: _normed(kl) * _normed(support_mass),
    "position": _position,
}
NEEDS: dict[str, tuple[str, ...]] = {
    "entropy": ("student_entropy",),
    "teachability": ("token_kl", SUPPORT_MASS),
    "position": ("sampled_reverse_kl",),
}


def support_threshold(logits: Tensor, shard: VocabShard) -> Tensor:
    """Return the logit of the student's 16th most probable token; -inf if there are fewer. Collective over the shard.

    Args:
        logits: [n, v] this rank's columns without padding.

    Returns:
        [n] float32 (float64 for float64 logits).
    """
    local_best = logits.new_full((len(logits), N_SUPPORT), -torch.inf, dtype=statistics_dtype(logits))
    best = logits.topk(min(N_SUPPORT, logits.shape[1]), dim=1).values
    local_best[:, : best.shape[1]] = best
    *best_of_ranks, _ = sum_over_shards(shard, list(local_best.unbind(dim=1)), local_best[:, :0])
    return torch.cat(best_of_ranks, dim=1).topk(N_SUPPORT, dim=1).values[:, -1]


def listed_support_mass(
    logits: Tensor, targets: TokenTargets, rows: RowLogprobs, shard: VocabShard, temperature: float
) -> Tensor:
    """Return the teacher's probability of the student's most probable tokens, as far as they are in its list: [n]."""
    assert targets.topk_ids is not None and targets.topk_logprobs is not None  # checked
    lowest = support_threshold(logits, shard) / temperature - rows.log_normalizer
    is_in = (targets.topk_ids >= 0) & (rows.logprobs[:, : targets.topk_ids.shape[1]] >= lowest[:, None])
    return targets.topk_logprobs.exp().masked_fill(~is_in, 0.0).sum(dim=1)


def full_support_mass(logits: Tensor, teacher_logits: Tensor, shard: VocabShard) -> Tensor:
    """Return the same over the whole vocabulary, from [n, v] logits of both; the teacher's are float32 or float64."""
    lowest = support_threshold(logits, shard)[:, None]
    sums = []
    for rows in pieces(logits):
        log_p = teacher_logits[rows]
        inside = log_p.masked_fill(logits[rows].to(log_p.dtype) < lowest[rows], -torch.inf)
        sums.append(torch.stack([log_p.logsumexp(dim=1), inside.logsumexp(dim=1)]))
    everything, inside, _ = sum_over_shards(shard, list(torch.cat(sums, dim=1)), teacher_logits[:, :0])
    return (inside.logsumexp(dim=1) - everything.logsumexp(dim=1)).exp()
