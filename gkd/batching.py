"""Scored rollouts -> micro-batches: order, padding, and which logits row learns from which teacher row.

tokens       p0 p1 p2 r0 r1 r2 <eos> pad
logits row    .  . r0 r1 r2 <eos>  .   .      (row t predicts token t + 1)
loss rows           ^  ^  ^  ^                loss_index = positions P-1 .. P-1+R-1
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from gkd.types import MicroBatch, Rollout, TeacherTopK


def make_micro_batches(
    rollouts: Sequence[Rollout],
    teacher: Sequence[TeacherTopK] | None,
    *,
    micro_batch_size: int,
    max_tokens: int = 0,
    pad_id: int = 0,
) -> list[MicroBatch]:
    """Every rollout once, in an order that does not depend on the order of arrival.

    Args:
        rollouts: this data-parallel rank's share of the batch.
        teacher: their scores, same order; None on pipeline stages that compute no loss (topk is [N, 0] there).
        micro_batch_size: sequences of a micro-batch, where max_tokens is 0.
        max_tokens: limit on B x S; a longer sequence gets a micro-batch of its own. Sequences are then grouped by
            length, so little is padding.
        pad_id: any valid token id; padded positions are behind the sequence and causal attention never sees them.
    """
    order = sorted(range(len(rollouts)), key=lambda i: rollouts[i].sample_index)
    if max_tokens:
        order.sort(key=lambda i: -rollouts[i].n_tokens)  # stable: equal lengths stay in the batch's order
        groups = _by_tokens(order, [r.n_tokens for r in rollouts], max_tokens)
    else:
        groups = (order[i : i + micro_batch_size] for i in range(0, len(order), micro_batch_size))
    return [
        _collate([rollouts[i] for i in group], None if teacher is None else [teacher[i] for i in group], pad_id)
        for group in groups
    ]


def _by_tokens(order: Sequence[int], lengths: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
    group: list[int] = []
    for i in order:  # longest first, so the first of a group decides its padded length
        if group and lengths[group[0]] * (len(group) + 1) > max_tokens:
            yield group
            group = []
        group.append(i)
    if group:
        yield group


def _collate(rollouts: Sequence[Rollout], teacher: Sequence[TeacherTopK] | None, pad_id: int) -> MicroBatch:
    length = max(r.n_tokens for r in rollouts)
    tokens = np.full((len(rollouts), length), pad_id, dtype=np.int64)
    loss_index: list[np.ndarray] = []
    for b, rollout in enumerate(rollouts):
        n_prompt, n_response = len(rollout.prompt_ids), len(rollout.response_ids)
        tokens[b, :n_prompt] = rollout.prompt_ids
        tokens[b, n_prompt : n_prompt + n_response] = rollout.response_ids
        first = b * length + n_prompt - 1
        loss_index.append(np.arange(first, first + n_response))
    index = np.concatenate(loss_index)
    if teacher is None:
        topk_ids, topk_logprobs = np.zeros((len(index), 0), np.int64), np.zeros((len(index), 0), np.float32)
    else:
        topk_ids = np.concatenate([t.topk_ids for t in teacher]).astype(np.int64)
        topk_logprobs = np.concatenate([t.topk_logprobs for t in teacher]).astype(np.float32)
    return MicroBatch(
        tokens=torch.from_numpy(tokens),
        position_ids=torch.arange(length).expand(len(rollouts), length),
        loss_index=torch.from_numpy(index),
        target_ids=torch.from_numpy(np.concatenate([r.response_ids for r in rollouts]).astype(np.int64)),
        topk_ids=torch.from_numpy(topk_ids),
        topk_logprobs=torch.from_numpy(topk_logprobs),
    )
