"""Check that teacher scores can belong to a rollout: shapes, dtypes, ids, probability mass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

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


def check_top_ids(rollout: Rollout, n: int, where: str) -> None:
    """Raise TeacherError if an on-policy rollout lacks the `n` ids per response token of distill.support."""
    expected, ids = (len(rollout.response_ids), n), rollout.top_ids
    if n and rollout.on_policy and (ids is None or ids.shape != expected):
        shape = "none" if ids is None else list(ids.shape)
        raise TeacherError(f"{where}: the student's most probable ids: {shape}, expected {list(expected)}")


def validate_topk(scores: TeacherTopK, n_vocab: int, where: str, *, n_rows: int | None = None) -> None:
    """Raise if the scores do not belong to a distribution over `n_vocab` tokens.

    The tolerance of a row's mass is 1e-3 plus the effect of rounding its logprobs to float16: a logprob l changes by up
    to |l| / 2^11, so the mass changes by up to sum(p |l|) / 2^11.

    Args:
        scores: [R, K] ids and logprobs, [R] tail_mass, with a mass target [R] counts.
        n_vocab: ids must be below it.
        where: names the sequence in the error, e.g. ``prompt 17, sample 2``.
        n_rows: expected R; None allows any.

    Raises:
        TeacherError: wrong shape or dtype, NaN or infinity, an id out of range or repeated in a row, logprobs not
            descending, a tail outside [0, 1], a mass above 1, mass + tail != 1, a count outside 1..K, or entries other
            than -1 and -inf beyond a count.
    """
    ids, logprobs, tail, counts = scores.topk_ids, scores.topk_logprobs, scores.tail_mass, scores.counts
    if ids.ndim != 2 or ids.shape != logprobs.shape or ids.size == 0 or (n_rows is not None and len(ids) != n_rows):
        expected = "[R, K]" if n_rows is None else f"[{n_rows}, K]"
        raise TeacherError(f"{where}: ids {ids.shape} and logprobs {logprobs.shape}, expected {expected} twice")
    if tail.shape != ids.shape[:1] or (counts is not None and counts.shape != tail.shape):
        shape = "none" if counts is None else counts.shape
        raise TeacherError(f"{where}: tail {tail.shape} and counts {shape}, expected [{len(ids)}]")
    if not np.issubdtype(ids.dtype, np.integer) or logprobs.dtype != np.float32 or tail.dtype != np.float32:
        raise TeacherError(
            f"{where}: ids {ids.dtype}, logprobs {logprobs.dtype} and tail {tail.dtype}, expected integers and float32"
        )
    if counts is None:
        _check_entries(where, ids, logprobs, n_vocab)
    else:
        _check_counted_entries(where, scores, counts, n_vocab)
    _check_mass(where, logprobs, tail)


def are_topk_valid(scores: Sequence[TeacherScores], rollouts: Sequence[Rollout], n_vocab: int) -> bool:
    """Return whether each sequence's top-k table passes `validate_topk`, from checks of many sequences at once.

    False also if the tables cannot be joined, e.g. because one is missing. `validate_scores` then names the sequence.
    """
    joined: list[TeacherTopK] = []
    n_rows = n_entries = 0
    layout = None if not scores or scores[0].topk is None else _layout(scores[0].topk, len(rollouts[0].response_ids))
    for score, rollout in zip(scores, rollouts, strict=True):
        table, rows = score.topk, len(rollout.response_ids)
        # Joining would hide a table with a row too many before one with a row too few, and convert a wrong dtype.
        if table is None or _layout(table, rows) != layout:
            return False
        joined.append(table)
        n_rows, n_entries = n_rows + rows, n_entries + table.topk_ids.size
        if n_entries >= _JOINED_ENTRIES or score is scores[-1]:
            if not _is_topk_valid(joined, n_vocab, n_rows):
                return False
            joined, n_rows, n_entries = [], 0, 0
    return True


def _layout(table: TeacherTopK, n_rows: int) -> tuple[object, ...]:
    """Return dtypes and row sizes of a table, and whether it has `n_rows` rows."""
    arrays = (table.topk_ids, table.topk_logprobs, table.tail_mass, table.counts)
    return tuple(a is not None and (a.dtype, a.shape[1:], a.shape[:1] == (n_rows,)) for a in arrays)


def _is_topk_valid(tables: Sequence[TeacherTopK], n_vocab: int, n_rows: int) -> bool:
    counts = [table.counts for table in tables if table.counts is not None]
    try:
        joined = TeacherTopK(
            np.concatenate([table.topk_ids for table in tables]),
            np.concatenate([table.topk_logprobs for table in tables]),
            np.concatenate([table.tail_mass for table in tables]),
            np.concatenate(counts) if counts else None,
        )
        validate_topk(joined, n_vocab, "joined sequences", n_rows=n_rows)
    except TeacherError:
        return False
    return True


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
    n_rows = len(rollout.response_ids)
    for signal in signals:
        if signal == "topk":
            validate_topk(_required(scores.topk, signal, where), n_vocab, where, n_rows=n_rows)
        elif signal == "sampled":
            _check_logprobs(where, signal, _required(scores.sampled_logprobs, signal, where), n_rows)
        elif signal == "logits":
            logits = _required(scores.logits, signal, where)
            _check_table(where, signal, logits, (n_rows, n_vocab), (np.float32, np.float16))
            _check_logits(where, logits)
        else:
            hidden = _required(scores.hidden, signal, where)
            _check_table(where, signal, hidden, (n_rows, hidden_size), (np.float32,))
            # Finite float32 values cannot overflow a float64 sum.
            _refuse_rows(where, ~np.isfinite(hidden.sum(1, dtype=np.float64)), "a hidden state is NaN or infinite")
    if with_reference:
        if scores.reference_logprobs is None:
            raise TeacherError(f"{where}: reference_logprobs are missing, but the loss requires them")
        _check_logprobs(f"{where}: the reference", "sampled", scores.reference_logprobs, n_rows)


def _required(table: T | None, signal: Signal, where: str) -> T:
    if table is None:
        raise TeacherError(f"{where}: the teacher's scores have no {signal!r} table, but the loss requires one")
    return table


def _check_logprobs(where: str, signal: Signal, logprobs: np.ndarray, n_rows: int) -> None:
    """Check [R] float32 logprobs of the response tokens."""
    _check_table(where, signal, logprobs, (n_rows,), (np.float32,))
    _refuse_rows(where, ~np.isfinite(logprobs), "the response token's logprob is NaN or infinite")
    _refuse_rows(where, logprobs > MASS_SLACK, "the response token's logprob is above 0")


def _check_table(
    where: str, signal: Signal, table: np.ndarray, shape: tuple[int | None, ...], dtypes: tuple[type[np.floating], ...]
) -> None:
    """Check shape and dtype; None in `shape`: any size."""
    fits = table.ndim == len(shape) and all(n in (None, got) for n, got in zip(shape, table.shape, strict=True))
    if not fits or table.dtype not in dtypes:
        kinds = " or ".join(dtype.__name__ for dtype in dtypes)
        expected = ", ".join("any" if n is None else str(n) for n in shape)
        raise TeacherError(f"{where}: {signal} is {table.dtype} {list(table.shape)}, expected {kinds} [{expected}]")


def _check_logits(where: str, logits: np.ndarray) -> None:
    """Check [R, V]. The maximum of a row reveals NaN, +inf, and a row of -inf."""
    if logits.dtype == np.float32:
        bad = ~np.isfinite(logits.max(1))
    else:  # on the bit patterns: numpy's float16 max is a hundred times slower
        bits = np.ascontiguousarray(logits).view(np.uint16)
        # The signed maximum is the largest positive number, the unsigned one the negative number of largest magnitude.
        largest, negative = bits.view(np.int16).max(1), bits.max(1)
        bad = (largest >= _FP16_INF) | (negative > _SIGN + _FP16_INF) | (bits.min(1) == _SIGN + _FP16_INF)
    _refuse_rows(where, bad, "a logit is NaN or +inf, or all of them are -inf")


def _check_mass(where: str, logprobs: np.ndarray, tail: np.ndarray) -> None:
    # A logprob far above 0 overflows to an infinite mass, which is refused as well.
    with np.errstate(over="ignore"):
        p = np.exp(logprobs)
        mass = p.sum(1)
    total, slack = mass + tail, np.full(len(mass), MASS_SLACK)
    doubtful = ~((np.abs(total - 1) <= slack) & (mass <= 1 + slack))  # NaN is doubtful, too
    if doubtful.any():  # rare; the sum below costs more than all other checks
        some = p[doubtful]
        slack[doubtful] -= _FP16_ROUNDING * (some * np.maximum(logprobs[doubtful], _MIN_FP16)).sum(1)
    _refuse_rows(where, ~(mass <= 1 + slack), f"probability mass is up to {mass.max():.6g}, above 1")
    _refuse_rows(where, ~((tail >= 0) & (tail <= 1)), "the tail mass is outside [0, 1]")
    worst = float(total[np.abs(total - 1).argmax()])
    _refuse_rows(where, ~(np.abs(total - 1) <= slack), f"listed mass plus tail mass is {worst:.6g}, not 1")


def _check_entries(where: str, ids: np.ndarray, logprobs: np.ndarray, n_vocab: int) -> None:
    """Check full rows: ids and logprobs [R, K]."""
    _refuse_rows(where, ~np.isfinite(logprobs), "a logprob is NaN or infinite")
    _refuse_rows(where, (ids < 0) | (ids >= n_vocab), f"a token id is outside [0, {n_vocab})")
    ordered = np.sort(ids, axis=1)
    _refuse_rows(where, ordered[:, 1:] == ordered[:, :-1], "a token id is repeated")
    _refuse_rows(where, logprobs[:, 1:] > logprobs[:, :-1], "logprobs are not descending")


def _check_counted_entries(where: str, scores: TeacherTopK, counts: np.ndarray, n_vocab: int) -> None:
    """Check rows of a mass target: the first `counts` entries are listed, the others are padding."""
    ids, logprobs = scores.topk_ids, scores.topk_logprobs
    k = ids.shape[1]
    if not np.issubdtype(counts.dtype, np.integer):
        raise TeacherError(f"{where}: counts {counts.dtype}, expected integers")
    _refuse_rows(where, (counts < 1) | (counts > k), f"a count is outside 1 to {k}")
    listed = np.arange(k) < counts[:, None]  # [R, K]
    padding = (ids == -1) & (logprobs == -np.inf)
    _refuse_rows(where, ~(listed | padding), "an entry beyond its row's count is not (-1, -inf)")
    # Replace the padding by unused ids and the last logprob, so that the checks of full rows apply.
    last = np.take_along_axis(logprobs, counts[:, None].astype(np.int64) - 1, axis=1)
    full_ids = np.where(listed, ids, n_vocab + np.arange(k))
    _refuse_rows(where, listed & ~np.isfinite(logprobs), "a logprob is NaN or infinite")
    _refuse_rows(where, listed & ((ids < 0) | (ids >= n_vocab)), f"a token id is outside [0, {n_vocab})")
    _check_entries(where, full_ids, np.where(listed, logprobs, last), n_vocab + k)


def _refuse_rows(where: str, bad: Any, problem: str) -> None:
    """Raise TeacherError for the first bad row; `bad` is [R] or [R, any] bool."""
    if bad.any():
        bad = bad if bad.ndim == 1 else bad.any(1)
        raise TeacherError(f"{where}: response position {int(bad.argmax())} ({int(bad.sum())} rows): {problem}")
