"""Check that teacher scores can belong to a rollout: shapes, dtypes, ids, probability mass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from gkd.errors import TeacherError
from gkd.types import Rollout, TeacherScores, TeacherTopK
from teacher_server.wire.protocol import Signal

MASS_SLACK = 1e-3  # rounding error of a row's probability: float32 sums and a float16 tail
_FP16_ROUNDING = 2.0**-11  # relative rounding error of float16
_MIN_FP16 = -65504.0
_JOINED_ENTRIES = 1 << 18  # entries of the tables that are checked at once: bounds the memory of their copy
_FP16_INF = 0x7C00  # bit pattern of float16 infinity; larger patterns are NaN
_SIGN = 0x8000  # sign bit of float16
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a table of one or several sequences, one after the other.

    Args:
        names: name the sequences in errors, e.g. ``prompt 17, sample 2``.
        n_rows: of each sequence.
        own: of each sequence, [R] bool, the tokens of its response that have rows; None means all. Empty: all of all.
    """

    names: Sequence[str]
    n_rows: Sequence[int]
    own: Sequence[np.ndarray | None] = ()

    def part(self, first: int, stop: int | None = None) -> Rows:
        """Return the rows of some sequences."""
        return Rows(self.names[first:stop], self.n_rows[first:stop], self.own[first:stop])

    def refuse(self, bad: np.ndarray, problem: str) -> None:
        """Raise TeacherError for the first bad row, with its token's position in the response of its sequence.

        Args:
            bad: [R] or [R, any] bool.
        """
        if not bad.any():
            return
        found = np.flatnonzero(bad if bad.ndim == 1 else bad.any(1))
        ends = np.cumsum(self.n_rows)
        index = int(np.searchsorted(ends, found[0], side="right"))
        start = int(ends[index]) - self.n_rows[index]
        n_bad = int(np.searchsorted(found, ends[index]))
        position, own = int(found[0]) - start, self.own[index] if self.own else None
        if own is not None:
            position = int(np.flatnonzero(own)[position])
        where = f"{self.names[index]}: response position {position}"
        raise TeacherError(f"{where} ({n_bad} rows): {problem}")


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


def validate_topk(scores: TeacherTopK, n_vocab: int, rows: Rows) -> None:
    """Raise if the scores do not belong to distributions over `n_vocab` tokens.

    The tolerance of a row's mass is 1e-3 plus the effect of rounding its logprobs to float16: a logprob l changes by up
    to |l| / 2^11, so the mass changes by up to sum(p |l|) / 2^11.

    Args:
        scores: [R, K] ids and logprobs, [R] tail_mass, with a mass target [R] counts.
        n_vocab: ids must be below it.

    Raises:
        TeacherError: naming a bad sequence: wrong shape or dtype, NaN or infinity, an id out of range or repeated in a
            row, logprobs not descending, a tail outside [0, 1], a mass above 1, mass + tail != 1, a count outside 1..K,
            or entries other than -1 and -inf beyond a count.
    """
    _check_layout(scores, rows)
    if scores.counts is None:
        _check_entries(rows, scores.topk_ids, scores.topk_logprobs, n_vocab)
    else:
        _check_counted_entries(rows, scores, scores.counts, n_vocab)
    _check_mass(rows, scores.topk_logprobs, scores.tail_mass)


def _check_layout(scores: TeacherTopK, rows: Rows) -> None:
    """Check shapes and dtypes."""
    ids, logprobs, tail, counts = scores.topk_ids, scores.topk_logprobs, scores.tail_mass, scores.counts
    where, n_rows = rows.names[0], sum(rows.n_rows)
    if ids.ndim != 2 or ids.shape != logprobs.shape or ids.size == 0 or len(ids) != n_rows:
        raise TeacherError(f"{where}: ids {ids.shape} and logprobs {logprobs.shape}, expected [{n_rows}, K] twice")
    if tail.shape != ids.shape[:1] or (counts is not None and counts.shape != tail.shape):
        shape = "none" if counts is None else counts.shape
        raise TeacherError(f"{where}: tail {tail.shape} and counts {shape}, expected [{len(ids)}]")
    if not np.issubdtype(ids.dtype, np.integer) or logprobs.dtype != np.float32 or tail.dtype != np.float32:
        raise TeacherError(
            f"{where}: ids {ids.dtype}, logprobs {logprobs.dtype} and tail {tail.dtype}, expected integers and float32"
        )
    if counts is not None and not np.issubdtype(counts.dtype, np.integer):
        raise TeacherError(f"{where}: counts {counts.dtype}, expected integers")


def validate_lists(scores: Sequence[TeacherScores], n_vocab: int, rows: Rows) -> None:
    """Raise TeacherError as `validate_topk` if the top-k table of a sequence is missing or wrong.

    Values are checked for many sequences at once, because a call costs as much as the rows of a short sequence.
    """
    joined: list[TeacherTopK] = []
    first = n_entries = 0
    for i, score in enumerate(scores):
        table = _required(score.topk, "topk", rows.names[i])
        _check_layout(table, rows.part(i, i + 1))
        if joined and (n_entries >= _JOINED_ENTRIES or _columns(table) != _columns(joined[0])):
            validate_topk(_joined(joined), n_vocab, rows.part(first, i))
            joined, first, n_entries = [], i, 0
        joined.append(table)
        n_entries += table.topk_ids.size
    if joined:
        validate_topk(_joined(joined), n_vocab, rows.part(first))


def _columns(table: TeacherTopK) -> tuple[int, bool]:
    """Return what tables must have in common to be joined."""
    return table.topk_ids.shape[1], table.counts is None


def _joined(tables: Sequence[TeacherTopK]) -> TeacherTopK:
    counts = [table.counts for table in tables if table.counts is not None]
    return TeacherTopK(
        np.concatenate([table.topk_ids for table in tables]),
        np.concatenate([table.topk_logprobs for table in tables]),
        np.concatenate([table.tail_mass for table in tables]),
        np.concatenate(counts) if counts else None,
    )


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
        TeacherError: a table is missing, has a wrong shape or dtype, or fails `validate_topk`; a response token's
            logprob is positive or not finite; a logit is NaN or +inf, or all logits of a row are -inf; a hidden state
            is not finite.
    """
    rows = rows_of([rollout], [scores], [where])
    (n_rows,) = rows.n_rows
    for signal in signals:
        if signal == "topk":
            validate_topk(_required(scores.topk, signal, where), n_vocab, rows)
        elif signal == "sampled":
            check_logprobs(rows, _required(scores.sampled_logprobs, signal, where))
        elif signal == "logits":
            logits = _required(scores.logits, signal, where)
            _check_table(where, signal, logits, (n_rows, n_vocab), (np.float32, np.float16))
            _check_logits(rows, logits)
        else:
            hidden = _required(scores.hidden, signal, where)
            _check_table(where, signal, hidden, (n_rows, hidden_size), (np.float32,))
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


def check_logprobs(rows: Rows, logprobs: np.ndarray) -> None:
    """Raise TeacherError if these are not [R] float32 logprobs of the response tokens."""
    _check_table(rows.names[0], "sampled", logprobs, (sum(rows.n_rows),), (np.float32,))
    rows.refuse(~np.isfinite(logprobs), "the response token's logprob is NaN or infinite")
    rows.refuse(logprobs > MASS_SLACK, "the response token's logprob is above 0")


def _check_table(
    where: str, signal: Signal, table: np.ndarray, shape: tuple[int | None, ...], dtypes: tuple[type[np.floating], ...]
) -> None:
    """Check shape and dtype; None in `shape`: any size."""
    fits = table.ndim == len(shape) and all(n in (None, got) for n, got in zip(shape, table.shape, strict=True))
    if not fits or table.dtype not in dtypes:
        kinds = " or ".join(dtype.__name__ for dtype in dtypes)
        expected = ", ".join("any" if n is None else str(n) for n in shape)
        raise TeacherError(f"{where}: {signal} is {table.dtype} {list(table.shape)}, expected {kinds} [{expected}]")


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


def _check_mass(rows: Rows, logprobs: np.ndarray, tail: np.ndarray) -> None:
    # A logprob far above 0 overflows to an infinite mass, which is refused as well.
    with np.errstate(over="ignore"):
        p = np.exp(logprobs)
        mass = p.sum(1)
    total, slack = mass + tail, np.full(len(mass), MASS_SLACK)
    doubtful = ~((np.abs(total - 1) <= slack) & (mass <= 1 + slack))  # NaN is doubtful, too
    if doubtful.any():  # rare; the sum below costs more than all other checks
        some = p[doubtful]
        slack[doubtful] -= _FP16_ROUNDING * (some * np.maximum(logprobs[doubtful], _MIN_FP16)).sum(1)
    heavy = ~(mass <= 1 + slack)
    rows.refuse(heavy, f"probability mass is {mass[heavy.argmax()]:.6g}, above 1")
    rows.refuse(~((tail >= 0) & (tail <= 1)), "the tail mass is outside [0, 1]")
    uneven = ~(np.abs(total - 1) <= slack)
    rows.refuse(uneven, f"listed mass plus tail mass is {total[uneven.argmax()]:.6g}, not 1")


def _check_entries(rows: Rows, ids: np.ndarray, logprobs: np.ndarray, n_vocab: int) -> None:
    """Check full rows: ids and logprobs [R, K]."""
    rows.refuse(~np.isfinite(logprobs), "a logprob is NaN or infinite")
    rows.refuse((ids < 0) | (ids >= n_vocab), f"a token id is outside [0, {n_vocab})")
    ordered = np.sort(ids, axis=1)
    rows.refuse(ordered[:, 1:] == ordered[:, :-1], "a token id is repeated")
    rows.refuse(logprobs[:, 1:] > logprobs[:, :-1], "logprobs are not descending")


def _check_counted_entries(rows: Rows, scores: TeacherTopK, counts: np.ndarray, n_vocab: int) -> None:
    """Check rows of a mass target: the first `counts` entries are listed, the others are padding."""
    ids, logprobs = scores.topk_ids, scores.topk_logprobs
    k = ids.shape[1]
    rows.refuse((counts < 1) | (counts > k), f"a count is outside 1 to {k}")
    listed = np.arange(k) < counts[:, None]  # [R, K]
    padding = (ids == -1) & (logprobs == -np.inf)
    rows.refuse(~(listed | padding), "an entry beyond its row's count is not (-1, -inf)")
    # Replace the padding by unused ids and the last logprob, so that the checks of full rows apply.
    last = np.take_along_axis(logprobs, counts[:, None].astype(np.int64) - 1, axis=1)
    full_ids = np.where(listed, ids, n_vocab + np.arange(k))
    rows.refuse(listed & ~np.isfinite(logprobs), "a logprob is NaN or infinite")
    rows.refuse(listed & ((ids < 0) | (ids >= n_vocab)), f"a token id is outside [0, {n_vocab})")
    _check_entries(rows, full_ids, np.where(listed, logprobs, last), n_vocab + k)
