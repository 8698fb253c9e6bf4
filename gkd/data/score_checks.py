"""Check that teacher scores can belong to a rollout: shapes, dtypes, ids, probability mass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from gkd.errors import TeacherError
from gkd.types import Rollout, TeacherScores
from teacher_server.wire.protocol import Signal
from teacher_server.wire.table import Rows, check_array, check_layout, check_logprobs, check_topk

_FP16_INF = 0x7C00  # bit pattern of float16 infinity; larger patterns are NaN
_SIGN = 0x8000  # sign bit of float16
T = TypeVar("T")


def check_own(rollout: Rollout, where: str) -> None:
    """Raise TeacherError if `own` is not [R] bool with at least one own token."""
    is_own = rollout.own
    expected = rollout.response_ids.shape
    if is_own is not None and (is_own.dtype != np.bool_ or is_own.shape != expected or not is_own.any()):
        problem = f"own is {is_own.dtype} {list(is_own.shape)} with {np.count_nonzero(is_own)} own tokens"
        raise TeacherError(f"{where}: {problem}, expected bool {list(expected)} with at least one")


def check_top_ids(rollout: Rollout, n: int, where: str) -> None:
    """Raise TeacherError if an on-policy rollout lacks the `n` ids per own token of distill.support."""
    expected = (rollout.n_own, n)
    ids = rollout.top_ids
    if n and rollout.on_policy and (ids is None or ids.shape != expected):
        shape = "none" if ids is None else list(ids.shape)
        raise TeacherError(f"{where}: the student's most probable ids: {shape}, expected {list(expected)}")


def validate_scores(
    scores: TeacherScores,
    rollout: Rollout,
    n_vocab: int,
    signals: Sequence[Signal],
    where: str,
    hidden_size: int | None = None,
    *,
    with_reference: bool = False,
    with_values: bool = True,
) -> None:
    """Raise if the scores cannot belong to `rollout`; the last check before training, one pass over each table.

    Args:
        n_vocab: token ids are below it, and rows of logits have this length.
        signals: required tables; others are not checked.
        where: names rank and sequence in the error, e.g. ``actor rank 3: prompt 17, sample 2``.
        hidden_size: D of the teacher; None allows any.
        with_reference: also require reference logprobs.
        with_values: check the values of the teacher's tables, not only their shapes and dtypes.

    Raises:
        TeacherError: a table is missing, has a wrong shape or dtype, or fails `check_topk`; a response token's
            logprob is positive or not finite; a logit is NaN or +inf, or all logits of a row are -inf; a hidden state
            is not finite.
    """
    theirs = scores.response_ids  # a teacher with another tokenizer has rows for all of its tokens
    n_rows = rollout.n_own if theirs is None else len(theirs)
    rows = Rows([where], [n_rows], [rollout.own if theirs is None else None])
    for signal in signals:
        if signal == "topk":
            table = _required(scores.topk, signal, where)
            if with_values:
                check_topk(table, n_vocab, rows)
            else:
                check_layout(table, rows)
        elif signal == "sampled":
            sampled = _required(scores.sampled_logprobs, signal, where)
            if with_values:
                check_logprobs(rows, sampled)
            else:
                check_array(where, signal, sampled, (n_rows,), (np.float32,))
        elif signal == "logits":
            logits = _required(scores.logits, signal, where)
            check_array(where, signal, logits, (n_rows, n_vocab), (np.float32, np.float16))
            if with_values:
                _check_logits(rows, logits)
        else:
            hidden = _required(scores.hidden, signal, where)
            check_array(where, signal, hidden, (n_rows, hidden_size), (np.float32,))
            if with_values:  # finite float32 values cannot overflow a float64 sum
                rows.refuse(~np.isfinite(hidden.sum(1, dtype=np.float64)), "a hidden state is NaN or infinite")
    if with_reference:
        if scores.reference_logprobs is None:
            raise TeacherError(f"{where}: reference_logprobs are missing, but the loss requires them")
        check_logprobs(Rows((f"{where}: the reference",), (rollout.n_own,), (rollout.own,)), scores.reference_logprobs)


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
        largest = bits.view(np.int16).max(1)
        negative = bits.max(1)
        bad = (largest >= _FP16_INF) | (negative > _SIGN + _FP16_INF) | (bits.min(1) == _SIGN + _FP16_INF)
    rows.refuse(bad, "a logit is NaN or +inf, or all of them are -inf")
