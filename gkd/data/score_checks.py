"""Check that teacher scores can belong to a rollout: shapes, dtypes, ids, probability mass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from gkd.errors import TeacherError
from gkd.types import Rollout, TeacherScores
from teacher_server.wire.protocol import Signal
from teacher_server.wire.table import Rows, TopKTable, check_array, check_layout, check_logprobs, check_topk

_JOINED_ENTRIES = 1 << 18  # entries of the tables that are checked at once: bounds the memory of their copy
_FP16_INF = 0x7C00  # bit pattern of float16 infinity; larger patterns are NaN
_SIGN = 0x8000  # sign bit of float16
T = TypeVar("T")


def rows_of(rollouts: Sequence[Rollout], scores: Sequence[TeacherScores], names: Sequence[str]) -> Rows:
    """Return the rows of the teacher's tables: the own tokens, or all tokens of a teacher with another tokenizer."""
    theirs = [score.response_ids for score in scores]
    n_rows = [r.n_own if ids is None else len(ids) for r, ids in zip(rollouts, theirs, strict=True)]
    return Rows(names, n_rows, [r.own if ids is None else None for r, ids in zip(rollouts, theirs, strict=True)])


def check_own(rollout: Rollout, where: str) -> None:
    """Raise TeacherError if `own` is not [R] bool with at least one own token."""
    own, expected = rollout.own, rollout.response_ids.shape
    if own is not None and (own.dtype != np.bool_ or own.shape != expected or not own.any()):
        problem = f"own is {own.dtype} {list(own.shape)} with {np.count_nonzero(own)} own tokens"
        raise TeacherError(f"{where}: {problem}, expected bool {list(expected)} with at least one")


def check_top_ids(rollout: Rollout, n: int, where: str) -> None:
    """Raise TeacherError if an on-policy rollout lacks the `n` ids per own token of distill.support."""
    expected, ids = (rollout.n_own, n), rollout.top_ids
    if n and rollout.on_policy and (ids is None or ids.shape != expected):
        shape = "none" if ids is None else list(ids.shape)
        raise TeacherError(f"{where}: the student's most probable ids: {shape}, expected {list(expected)}")


def validate_lists(scores: Sequence[TeacherScores], n_vocab: int, rows: Rows) -> None:
    """Raise TeacherError as `check_topk` if the top-k table of a sequence is missing or wrong.

    Values are checked for many sequences at once, because a call costs as much as the rows of a short sequence.
    """
    joined: list[TopKTable] = []
    first = n_entries = 0
    for i, score in enumerate(scores):
        table = _required(score.topk, "topk", rows.names[i])
        check_layout(table, rows.part(i, i + 1))
        if joined and (n_entries >= _JOINED_ENTRIES or _columns(table) != _columns(joined[0])):
            check_topk(TopKTable.join(joined), n_vocab, rows.part(first, i))
            joined, first, n_entries = [], i, 0
        joined.append(table)
        n_entries += table.ids.size
    if joined:
        check_topk(TopKTable.join(joined), n_vocab, rows.part(first))


def _columns(table: TopKTable) -> tuple[int, bool]:
    """Return what tables must have in common to be joined."""
    return table.ids.shape[1], table.counts is None


def validate_scores(
    scores: TeacherScores,
    rollout: Rollout,
    n_vocab: int,
    signals: Sequence[Signal],
    where: str,
    hidden_size: int | None = None,
    *,
    with_reference: bool = False,
) -> None:
    """Raise if the scores cannot belong to `rollout`; the last check before training, one pass over each table.

    Args:
        n_vocab: token ids are below it, and rows of logits have this length.
        signals: required tables; others are not checked.
        where: names rank and sequence in the error, e.g. ``actor rank 3: prompt 17, sample 2``.
        hidden_size: D of the teacher; None allows any.
        with_reference: also require reference logprobs.

    Raises:
        TeacherError: a table is missing, has a wrong shape or dtype, or fails `check_topk`; a response token's
            logprob is positive or not finite; a logit is NaN or +inf, or all logits of a row are -inf; a hidden state
            is not finite.
    """
    rows = rows_of([rollout], [scores], [where])
    (n_rows,) = rows.n_rows
    for signal in signals:
        if signal == "topk":
            check_topk(_required(scores.topk, signal, where), n_vocab, rows)
        elif signal == "sampled":
            check_logprobs(rows, _required(scores.sampled_logprobs, signal, where))
        elif signal == "logits":
            logits = _required(scores.logits, signal, where)
            check_array(where, signal, logits, (n_rows, n_vocab), (np.float32, np.float16))
            _check_logits(rows, logits)
        else:
            hidden = _required(scores.hidden, signal, where)
            check_array(where, signal, hidden, (n_rows, hidden_size), (np.float32,))
            # Finite float32 values cannot overflow a float64 sum.
            rows.refuse(~np.isfinite(hidden.sum(1, dtype=np.float64)), "a hidden state is NaN or infinite")
    if with_reference:
        if scores.reference_logprobs is None:
            raise TeacherError(f"{where}: reference_logprobs are missing, but the loss requires them")
        own = Rows((f"{where}: the reference",), (rollout.n_own,), (rollout.own,))
        check_logprobs(own, scores.reference_logprobs)


def _required(table: T | None, signal: Signal, where: str) -> T:
    if table is None:
        raise TeacherError(f"{where}: the teacher's scores have no {signal!r} table, but the loss requires one")
    return table


def _check_logits(rows: Rows, logits: np.ndarray) -> None:
    """Check [R, V]. The maximum of a row reveals NaN, +inf, and a row of -inf."""
    if logits.dtype == np.float32:
        bad = ~np.isfinite(logits.max(1))
    else:  # on the bit patterns: numpy's float16 max is a hundred times slower
        bits = np.ascontiguousarray(logits).view(np.uint16)
        # The signed maximum is the largest positive number, the unsigned one the negative number of largest magnitude.
        largest, negative = bits.view(np.int16).max(1), bits.max(1)
        bad = (largest >= _FP16_INF) | (negative > _SIGN + _FP16_INF) | (bits.min(1) == _SIGN + _FP16_INF)
    rows.refuse(bad, "a logit is NaN or +inf, or all of them are -inf")
