"""Scored rollouts -> micro-batches: checks, order, and which sequences share one; `gkd.data.collate` makes the tensors.

tokens       p0 p1 p2 r0 r1 r2 <eos> pad
logits row    .  . r0 r1 r2 <eos>  .   .      (row t predicts token t + 1)
loss rows           ^  ^  ^  ^                loss_index = positions P-1 .. P-1+R-1
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from gkd.data.collate import MicroBatches
from gkd.data.score_checks import validate_scores
from gkd.errors import DataError
from gkd.handles import TokenRecord
from gkd.types import Rollout, TeacherScores
from teacher_server.wire.protocol import Signal


def check_batch(
    rollouts: Sequence[Rollout],
    scores: Sequence[TeacherScores] | None,
    *,
    where: str,
    n_vocab: int,
    wanted: Sequence[Signal],
    hidden_size: int | None = None,
    with_reference: bool = False,
) -> None:
    """Refuse what `make_micro_batches` could build and no student should learn from; called before it.

    Args:
        scores: of the rollouts, same order; None on pipeline stages that compute no loss.
        where: names the rank in errors: ``actor rank 3``.
        n_vocab: token ids are below it.
        wanted: what the loss needs of the teacher, see `gkd.config.loss_spec.teacher_signals`.
        hidden_size: D of the teacher; None: any.
        with_reference: the loss has a term that needs a reference's logprobs.

    Raises:
        DataError: names rank, prompt and sample: no prompt or no response token (nothing to learn), a token id out of
            range, or, where the student wrote the response, not one finite logprob for each of its tokens.
        TeacherError: likewise; see `gkd.data.score_checks.validate_scores`.
    """
    if scores is not None and len(scores) != len(rollouts):
        raise DataError(f"{where}: {len(scores)} sequences are scored, expected the {len(rollouts)} rollouts")
    for i, rollout in enumerate(rollouts):
        sample = f"{where}: prompt {rollout.prompt_id}, sample {rollout.sample_index}"
        _check_rollout(rollout, n_vocab, sample)
        if scores is not None:
            validate_scores(scores[i], rollout, n_vocab, wanted, sample, hidden_size, with_reference=with_reference)


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
    packed: bool = False,
    pad_id: int = 0,
) -> MicroBatches:
    """Every rollout once, in an order that does not depend on the order of arrival.

    Args:
        rollouts: this data-parallel rank's share of the batch.
        scores: the teacher's, same order, all with the same tables; None on pipeline stages that compute no loss, where
            `targets` is None.
        micro_batch_size: sequences of a micro-batch, where max_tokens is 0.
        max_tokens: limit on its tokens, padding included; a longer sequence gets a micro-batch of its own.
        packed: sequences one after the other in one row, see `MicroBatch`; else padded to the longest of them.
        pad_id: any valid token id; padded positions are behind the sequence and causal attention never sees them.

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
    return MicroBatches(rollouts, scores, groups, packed=packed, pad_id=pad_id)


def token_records(
    batches: MicroBatches, tables: Sequence[torch.Tensor], names: Sequence[str], rollouts: Sequence[Rollout]
) -> list[TokenRecord]:
    """The loss's numbers of each token of some sequences, put back together by sequence.

    Args:
        tables: [n, len(names)] each, one after the other the rows of `batches`.
        rollouts: the sequences that are wanted.
    """
    wanted = {rollout.sample_index: rollout for rollout in rollouts}
    rows = torch.cat(list(tables)) if tables else torch.zeros(0, len(names))
    records, stop = [], 0
    for index, n_rows in batches.samples:
        start, stop = stop, stop + n_rows
        if (rollout := wanted.get(index)) is not None:
            values = {name: rows[start:stop, i].tolist() for i, name in enumerate(names)}
            records.append(TokenRecord(rollout.prompt_id, index, rollout.response_ids.tolist(), values))
    if stop != len(rows):
        raise DataError(f"the loss has numbers of {len(rows)} tokens, and the batch has {stop}")
    return records


def _by_longest(order: Sequence[int], lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Padded: the longest sequence of a micro-batch decides what each of the others costs, so neighbours share one.

    Args:
        order: places, longest first.
    """
    groups: list[list[int]] = []
    for i in order:
        if groups and lengths[groups[-1][0]] * (len(groups[-1]) + 1) <= max_tokens:
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups


def _by_sum(order: Sequence[int], lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Packed: first-fit decreasing, at most 11/9 of the fewest possible micro-batches and one more.

    Args:
        order: places, longest first; each goes to the first micro-batch that has room.
    """
    groups: list[list[int]] = []
    # Tokens that each micro-batch can still take; one that is not begun yet takes any sequence.
    room = np.full(len(order), np.iinfo(np.int64).max)
    for i in order:
        at = int(np.argmax(room >= lengths[i]))
        if at == len(groups):
            groups.append([])
            room[at] = max(max_tokens, lengths[i])
        groups[at].append(i)
        room[at] -= lengths[i]
    return groups
