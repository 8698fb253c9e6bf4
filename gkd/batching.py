"""Scored rollouts -> micro-batches: checks, order, padding, and which logits row learns from which teacher row.

tokens       p0 p1 p2 r0 r1 r2 <eos> pad
logits row    .  . r0 r1 r2 <eos>  .   .      (row t predicts token t + 1)
loss rows           ^  ^  ^  ^                loss_index = positions P-1 .. P-1+R-1
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import DTypeLike

from gkd.errors import DataError
from gkd.roles import TokenRecord
from gkd.teacher.base import validate_scores
from gkd.types import MicroBatch, Rollout, TeacherScores, TokenTargets
from teacher_server.protocol import Signal

T = TypeVar("T")


def check_batch(
    rollouts: Sequence[Rollout],
    scores: Sequence[TeacherScores] | None,
    *,
    where: str,
    n_vocab: int,
    wanted: Sequence[Signal],
    hidden_size: int | None = None,
) -> None:
    """Refuse what `make_micro_batches` could build and no student should learn from; called before it.

    Args:
        scores: of the rollouts, same order; None on pipeline stages that compute no loss.
        where: names the rank in errors: ``actor rank 3``.
        n_vocab: token ids are below it.
        wanted: what the loss needs of the teacher, see `gkd.loss.spec.teacher_signals`.
        hidden_size: D of the teacher; None: any.

    Raises:
        DataError: names rank, prompt and sample: no prompt or no response token (nothing to learn), a token id out of
            range, or, where the student wrote the response, not one finite logprob for each of its tokens.
        TeacherError: likewise; see `gkd.teacher.base.validate_scores`.
    """
    if scores is not None and len(scores) != len(rollouts):
        raise DataError(f"{where}: {len(scores)} sequences are scored, expected the {len(rollouts)} rollouts")
    for i, rollout in enumerate(rollouts):
        sample = f"{where}: prompt {rollout.prompt_id}, sample {rollout.sample_index}"
        _check_rollout(rollout, n_vocab, sample)
        if scores is not None:
            validate_scores(scores[i], rollout, n_vocab, wanted, sample, hidden_size)


def _check_rollout(rollout: Rollout, n_vocab: int, where: str) -> None:
    for what, ids in (("prompt", rollout.prompt_ids), ("response", rollout.response_ids)):
        if len(ids) == 0:
            raise DataError(f"{where}: the {what} has no tokens, so there is nothing to learn")
        outside = (ids < 0) | (ids >= n_vocab)
        if outside.any():
            at = int(outside.argmax())
            raise DataError(f"{where}: {what} position {at}: token id {ids[at]} is outside [0, {n_vocab})")
    logprobs, n_response = rollout.rollout_logprobs, len(rollout.response_ids)
    if not rollout.on_policy:
        return
    if logprobs.shape != (n_response,):
        raise DataError(f"{where}: rollout logprobs {list(logprobs.shape)}, expected [{n_response}]")
    if not np.isfinite(logprobs).all():
        at = int((~np.isfinite(logprobs)).argmax())
        raise DataError(f"{where}: response position {at}: the rollout logprob is {logprobs[at]}")


def make_micro_batches(
    rollouts: Sequence[Rollout],
    scores: Sequence[TeacherScores] | None,
    *,
    micro_batch_size: int,
    max_tokens: int = 0,
    pad_id: int = 0,
) -> list[MicroBatch]:
    """Every rollout once, in an order that does not depend on the order of arrival.

    Args:
        rollouts: this data-parallel rank's share of the batch.
        scores: the teacher's, same order, all with the same tables; None on pipeline stages that compute no loss, where
            `targets` is None.
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
        _collate([rollouts[i] for i in group], None if scores is None else [scores[i] for i in group], pad_id)
        for group in groups
    ]


def token_records(
    batches: Sequence[MicroBatch], tables: Sequence[torch.Tensor], names: Sequence[str], rollouts: Sequence[Rollout]
) -> list[TokenRecord]:
    """The loss's numbers of each token of some sequences, put back together by sequence.

    Args:
        tables: [n, len(names)] each, one after the other the rows of `batches`.
        rollouts: the sequences that are wanted.
    """
    wanted = {rollout.sample_index: rollout for rollout in rollouts}
    rows = torch.cat(list(tables)) if tables else torch.zeros(0, len(names))
    records, stop = [], 0
    for index, n_rows in (pair for batch in batches for pair in batch.samples):
        start, stop = stop, stop + n_rows
        if (rollout := wanted.get(index)) is not None:
            values = {name: rows[start:stop, i].tolist() for i, name in enumerate(names)}
            records.append(TokenRecord(rollout.prompt_id, index, rollout.response_ids.tolist(), values))
    if stop != len(rows):
        raise DataError(f"the loss has numbers of {len(rows)} tokens, and the batch has {stop}")
    return records


def _by_tokens(order: Sequence[int], lengths: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
    group: list[int] = []
    for i in order:  # longest first, so the first of a group decides its padded length
        if group and lengths[group[0]] * (len(group) + 1) > max_tokens:
            yield group
            group = []
        group.append(i)
    if group:
        yield group


def _collate(rollouts: Sequence[Rollout], scores: Sequence[TeacherScores] | None, pad_id: int) -> MicroBatch:
    length = max(r.n_tokens for r in rollouts)
    tokens = np.full((len(rollouts), length), pad_id, dtype=np.int64)
    loss_index: list[np.ndarray] = []
    for b, rollout in enumerate(rollouts):
        n_prompt, n_response = len(rollout.prompt_ids), len(rollout.response_ids)
        tokens[b, :n_prompt] = rollout.prompt_ids
        tokens[b, n_prompt : n_prompt + n_response] = rollout.response_ids
        first = b * length + n_prompt - 1
        loss_index.append(np.arange(first, first + n_response))
    return MicroBatch(
        tokens=torch.from_numpy(tokens),
        position_ids=torch.arange(length).expand(len(rollouts), length),
        loss_index=torch.from_numpy(np.concatenate(loss_index)),
        targets=None if scores is None else _targets(rollouts, scores),
        samples=tuple((r.sample_index, len(r.response_ids)) for r in rollouts),
    )


def _targets(rollouts: Sequence[Rollout], scores: Sequence[TeacherScores]) -> TokenTargets:
    n_rows = [len(r.response_ids) for r in rollouts]
    written = [r.rollout_logprobs if r.on_policy else np.zeros(n) for r, n in zip(rollouts, n_rows, strict=True)]
    targets = TokenTargets(
        sampled_ids=_rows([r.response_ids for r in rollouts], np.int64),
        rollout_logprobs=_rows(written, np.float32),
        on_policy=torch.from_numpy(np.repeat([r.on_policy for r in rollouts], n_rows)),
    )
    if topk := _tables([s.topk for s in scores], "topk"):
        width = max(t.topk_ids.shape[1] for t in topk)
        targets.topk_ids = _rows([_widened(t.topk_ids, width, -1) for t in topk], np.int64)
        targets.topk_logprobs = _rows([_widened(t.topk_logprobs, width, -np.inf) for t in topk], np.float32)
        targets.tail_mass = _rows([t.tail_mass for t in topk], np.float32)
    if sampled := _tables([s.sampled_logprobs for s in scores], "sampled"):
        targets.sampled_logprobs = _rows(sampled, np.float32)
    if logits := _tables([s.logits for s in scores], "logits"):
        targets.logits = _rows(logits, logits[0].dtype)
    if hidden := _tables([s.hidden for s in scores], "hidden"):
        targets.hidden = _rows(hidden, np.float32)
    return targets


def _tables(tables: Sequence[T | None], signal: Signal) -> list[T]:
    """Those of all sequences of a micro-batch, or of none."""
    there = [table for table in tables if table is not None]
    if len(there) not in (0, len(tables)):
        raise DataError(f"only {len(there)} of the {len(tables)} sequences of a micro-batch have a {signal} table")
    return there


def _widened(table: np.ndarray, width: int, filler: float) -> np.ndarray:
    """[R, K] -> [R, width], as the entries past a row's count are filled."""
    missing = width - table.shape[1]
    return table if missing == 0 else np.pad(table, ((0, 0), (0, missing)), constant_values=filler)


def _rows(tables: Sequence[np.ndarray], dtype: DTypeLike) -> torch.Tensor:
    """One below the other, in memory of their own: what comes from the object store is read-only."""
    return torch.from_numpy(np.concatenate(tables, dtype=dtype, casting="same_kind"))
