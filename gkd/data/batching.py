"""Group scored rollouts into micro-batches and check them; `gkd.data.collate` builds the tensors.

tokens       p0 p1 p2 r0 r1 r2 <eos> pad
logits row    .  . r0 r1 r2 <eos>  .   .      (row t predicts token t + 1)
loss rows           ^  ^  ^  ^                loss_index = positions P-1 .. P-1+R-1
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch

from gkd.data.collate import MicroBatches
from gkd.data.score_checks import validate_scores
from gkd.errors import DataError
from gkd.text.comparison import SAME_TOKENS, Comparison
from gkd.types import Rollout, TeacherScores, TokenRecord
from teacher_server.wire.protocol import Signal
from teacher_server.wire.table import TopKTable


def check_batch(
    rollouts: Sequence[Rollout],
    scores: Sequence[TeacherScores] | None,
    *,
    where: str,
    n_vocab: int,
    signals: Sequence[Signal],
    hidden_size: int | None = None,
    n_teacher_vocab: int = 0,
    with_reference: bool = False,
    with_values: bool = True,
) -> None:
    """Check rollouts and scores before `make_micro_batches`.

    Args:
        scores: of the rollouts, in the same order; None on pipeline stages that compute no loss.
        where: names the rank in errors: ``actor rank 3``.
        n_vocab: token ids are below it.
        signals: required by the loss, see `gkd.config.loss_spec.teacher_signals`.
        hidden_size: D of the teacher; None allows any.
        n_teacher_vocab: ids of a teacher with another tokenizer are below it.
        with_reference: the loss requires reference logprobs.
        with_values: check the values of the teacher's tables. A client of a server has checked them when they arrived;
            then only shapes and dtypes are checked here.

    Raises:
        DataError: no prompt or own token, a token id out of range, a mask of another length, or, if on-policy, not one
            finite logprob per own token. Names rank, prompt and sample.
        TeacherError: see `gkd.data.score_checks.validate_scores`.
    """
    if scores is not None and len(scores) != len(rollouts):
        raise DataError(f"{where}: {len(scores)} scores for {len(rollouts)} rollouts")
    names = [f"{where}: prompt {rollout.prompt_id}, sample {rollout.sample_index}" for rollout in rollouts]
    for rollout, name in zip(rollouts, names, strict=True):
        _check_rollout(rollout, n_vocab, name)
    if scores is None:
        return
    row_signals = [signal for signal in signals if signal != "topk"]
    flags = {"with_reference": with_reference, "with_values": with_values}
    for score, rollout, name in zip(scores, rollouts, names, strict=True):
        # The text of a response may have no token of the teacher, and then no list.
        is_empty = score.response_ids is not None and not len(score.response_ids)
        required = row_signals if is_empty else signals
        validate_scores(score, rollout, n_teacher_vocab or n_vocab, required, name, hidden_size, **flags)


def _check_rollout(rollout: Rollout, n_vocab: int, where: str) -> None:
    for what, ids in (("prompt", rollout.prompt_ids), ("response", rollout.response_ids)):
        if len(ids) == 0:
            raise DataError(f"{where}: the {what} has no tokens")
        outside = (ids < 0) | (ids >= n_vocab)
        if outside.any():
            index = int(outside.argmax())
            raise DataError(f"{where}: {what} position {index}: token id {ids[index]} is outside [0, {n_vocab})")
    if (is_own := rollout.own) is not None and (is_own.shape != rollout.response_ids.shape or not is_own.any()):
        raise DataError(f"{where}: the mask marks {is_own.sum()} of {is_own.size} tokens, the response has {len(ids)}")
    logprobs = rollout.rollout_logprobs
    n_own = rollout.n_own
    if not rollout.on_policy:
        return
    if logprobs.shape != (n_own,):
        raise DataError(f"{where}: rollout logprobs {list(logprobs.shape)}, expected [{n_own}]")
    if not np.isfinite(logprobs).all():
        index = int((~np.isfinite(logprobs)).argmax())
        position = index if is_own is None else int(np.flatnonzero(is_own)[index])
        raise DataError(f"{where}: response position {position}: the rollout logprob is {logprobs[index]}")


def trained_on(
    rollouts: list[Rollout], scores: list[TeacherScores] | None, n: int
) -> tuple[list[Rollout], list[TeacherScores] | None]:
    """Leave out responses with a factor of 0, and count the first own tokens of the others as their prompts.

    These tokens are read and carry no loss.

    Args:
        scores: of the rollouts, in the same order.
        n: distill.skip_first_tokens.

    Returns:
        The sequences that have more own tokens than that, and their scores.
    """
    kept = [i for i, rollout in enumerate(rollouts) if rollout.n_own > n and rollout.factor]
    if len(kept) < len(rollouts):
        rollouts = [rollouts[i] for i in kept]
        scores = None if scores is None else [scores[i] for i in kept]
    if not n:
        return rollouts, scores
    shorter = [_cut(rollout, n) for rollout in rollouts]
    return shorter, None if scores is None else [_rest(score, n) for score in scores]


def _cut(rollout: Rollout, n: int) -> Rollout:
    first = n if rollout.own is None else int(np.flatnonzero(rollout.own)[n])  # position of the first token that stays
    return replace(
        rollout,
        prompt_ids=np.concatenate([rollout.prompt_ids, rollout.response_ids[:first]]),
        response_ids=rollout.response_ids[first:],
        own=None if rollout.own is None else rollout.own[first:],
        first_turn=0 if rollout.own is None else replace(rollout, own=rollout.own[: first + 1]).n_turns - 1,
        rollout_logprobs=rollout.rollout_logprobs[n:],
        top_ids=None if rollout.top_ids is None else rollout.top_ids[n:],
    )


def _rest(scores: TeacherScores, n: int) -> TeacherScores:
    """Return the tables without their first rows."""
    rest: dict[str, Any] = {}
    for item in fields(scores):
        table = getattr(scores, item.name)
        if table is not None:
            rest[item.name] = table.rows(slice(n, None)) if isinstance(table, TopKTable) else table[n:]
    return replace(scores, **rest)


def make_micro_batches(
    rollouts: Sequence[Rollout],
    scores: Sequence[TeacherScores] | None,
    *,
    micro_batch_size: int,
    max_tokens: int = 0,
    packed: bool = False,
    pad_id: int = 0,
    comparison: Comparison = SAME_TOKENS,
) -> MicroBatches:
    """Return micro-batches of all rollouts, in an order that does not depend on the order of arrival.

    Args:
        rollouts: the sequences of this data-parallel rank.
        scores: of the rollouts, in the same order, all with the same tables; None on pipeline stages that compute no
            loss: `targets` is None.
        micro_batch_size: sequences per micro-batch; used if max_tokens is 0.
        max_tokens: maximum number of tokens, padding included; a longer sequence gets its own micro-batch.
        packed: concatenate sequences in one row, see `MicroBatch`; otherwise pad to the longest.
        pad_id: any valid token id; padding follows the sequence, so causal attention never reads it.

    Raises:
        DataError: only some of the sequences have one of the teacher's tables.
    """
    order = sorted(range(len(rollouts)), key=lambda i: rollouts[i].sample_index)
    if max_tokens:
        order.sort(key=lambda i: -rollouts[i].n_tokens)  # stable: equal lengths stay in the batch's order
        lengths = [r.n_tokens for r in rollouts]
        groups = _by_sum(order, lengths, max_tokens) if packed else _by_longest(order, lengths, max_tokens)
    else:
        groups = [order[i : i + micro_batch_size] for i in range(0, len(order), micro_batch_size)]
    return MicroBatches(rollouts, scores, groups, packed=packed, pad_id=pad_id, comparison=comparison)


def token_records(
    batches: MicroBatches,
    tables: Sequence[torch.Tensor],
    names: Sequence[str],
    rollouts: Sequence[Rollout],
    choices: Sequence[torch.Tensor] = (),
) -> list[TokenRecord]:
    """Return the loss terms of each token of some sequences, and the teacher's choices, by sequence.

    Args:
        tables: [n, len(names)] each; concatenated, the rows of `batches`.
        rollouts: sequences to return.
        choices: [n, C, 3] each, of the same rows, see `gkd.loss.choices`; empty means the teacher sent no distribution.
    """
    by_index = {rollout.sample_index: rollout for rollout in rollouts}
    rows = torch.cat(list(tables)) if tables else torch.zeros(0, len(names))
    chosen = torch.cat(list(choices)) if choices else None
    records = []
    stop = 0
    for index, n_rows in batches.samples:
        start = stop
        stop = stop + n_rows
        if (rollout := by_index.get(index)) is not None:
            values = {name: rows[start:stop, i].tolist() for i, name in enumerate(names)}
            prompt_ids = rollout.prompt_ids.tolist()
            response_ids = rollout.response_ids.tolist()
            top = [] if chosen is None else [_choices_of(row) for row in chosen[start:stop].tolist()]
            observed = [] if rollout.own is None else np.flatnonzero(~rollout.own).tolist()
            records.append(TokenRecord(rollout.prompt_id, index, prompt_ids, response_ids, values, top, observed))
    if stop != len(rows):
        raise DataError(f"the loss returned terms of {len(rows)} tokens, but the batch has {stop}")
    return records


def _choices_of(row: Sequence[Sequence[float]]) -> list[tuple[int, float, float]]:
    """Return (id, teacher's probability, student's) of one token; with a mass target its list may be shorter."""
    return [(int(token), round(p, 6), round(q, 6)) for token, p, q in row if token >= 0]


def _by_longest(order: Sequence[int], lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Group `order`, longest first, for padding: a sequence costs as much as the longest one of its micro-batch."""
    groups: list[list[int]] = []
    for i in order:
        if groups and lengths[groups[-1][0]] * (len(groups[-1]) + 1) <= max_tokens:
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups


def _by_sum(order: Sequence[int], lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Group `order`, longest first, for packing: first-fit decreasing, at most 11/9 of the optimal number plus one."""
    groups: list[list[int]] = []
    # Remaining tokens of each micro-batch; an empty one takes a sequence of any length.
    room = np.full(len(order), np.iinfo(np.int64).max)
    for i in order:
        group = int(np.argmax(room >= lengths[i]))
        if group == len(groups):
            groups.append([])
            room[group] = max(max_tokens, lengths[i])
        groups[group].append(i)
        room[group] -= lengths[i]
    return groups
