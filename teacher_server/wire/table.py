"""The table of the most probable ids of each position: its arrays, some of its rows, and the check of its values.

Engines make tables, the wire format packs and unpacks them, the trainer's loss reads them. Tables that left a socket or
an engine are checked once, with `check_topk`.

Letters: M rows, K entries of a row, V ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from teacher_server.errors import TeacherError

NO_ID = -1  # id of the entries that a mass target leaves out of a row; their logprob is -inf
MASS_SLACK = 1e-3  # rounding error of a row's probability: float32 sums and a float16 tail
_FP16_ROUNDING = 2.0**-11  # relative rounding error of float16
_MIN_FP16 = -65504.0


@dataclass(frozen=True, slots=True)
class TopKTable:
    """The K most probable ids at each of M positions, or ids that the request has named, and the rest's probability.

    The logprobs are normalized over the full (common) vocabulary at the request's temperature *before* the cut to K,
    so `exp(logprobs).sum(-1)` is the true probability of these ids (<= 1). With a mass target, a row lists only as many
    ids as needed to reach it: `counts` ids, followed by entries NO_ID and -inf.
    """

    ids: np.ndarray  # [M, K] int32
    logprobs: np.ndarray  # [M, K] float32, nats, descending
    tail: np.ndarray  # [M] float32, probability of every id that is not listed
    counts: np.ndarray | None = None  # [M] int32, listed ids of each row, 1..K; None without a mass target: all K
    sampled: np.ndarray | None = None  # [M] float32, nats, of the next token; None: not requested, or kept apart

    @classmethod
    def without_tail(cls, ids: np.ndarray, logprobs: np.ndarray) -> TopKTable:
        """Return the table of an engine that gives no exact rest: the tail is 1 - the listed mass, at least 0.

        Args:
            ids: [M, K] int32.
            logprobs: [M, K] float32, nats.
        """
        with np.errstate(over="ignore"):  # logprobs that the checks refuse overflow
            tail = np.clip(1.0 - np.exp(logprobs.astype(np.float64)).sum(axis=1), 0.0, 1.0).astype(np.float32)
        return cls(np.ascontiguousarray(ids), np.ascontiguousarray(logprobs), tail)

    def rows(self, rows: slice) -> TopKTable:
        """Return some rows, as views."""
        counts = None if self.counts is None else self.counts[rows]
        sampled = None if self.sampled is None else self.sampled[rows]
        return TopKTable(self.ids[rows], self.logprobs[rows], self.tail[rows], counts, sampled)

    def split(self, n_rows: Sequence[int]) -> list[TopKTable]:
        """Return the rows of each sequence, as views. The sum of `n_rows` is M."""
        return [self.rows(part) for part in row_slices(n_rows)]

    @staticmethod
    def join(tables: Sequence[TopKTable]) -> TopKTable:
        """Return the rows of one table after the other; all have the same K and the same optional arrays."""
        if len(tables) == 1:
            return tables[0]
        counts = [table.counts for table in tables if table.counts is not None]
        sampled = [table.sampled for table in tables if table.sampled is not None]
        return TopKTable(
            np.concatenate([table.ids for table in tables]),
            np.concatenate([table.logprobs for table in tables]),
            np.concatenate([table.tail for table in tables]),
            np.concatenate(counts) if counts else None,
            np.concatenate(sampled) if sampled else None,
        )


def row_slices(n_rows: Sequence[int]) -> list[slice]:
    """Return the rows of each sequence in a table that has one sequence after the other."""
    return [slice(end - n, end) for end, n in zip(np.cumsum(n_rows).tolist(), n_rows, strict=True)]


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a table of one or several sequences, one after the other, for the errors of checks.

    Args:
        names: name the sequences in errors, e.g. ``prompt 17, sample 2``.
        n_rows: of each sequence.
        own: of each sequence, [R] bool, the tokens of its response that have rows; None means all. Empty: all of all.
    """

    names: Sequence[str]
    n_rows: Sequence[int]
    own: Sequence[np.ndarray | None] = ()

    def refuse(self, bad: np.ndarray, problem: str) -> None:
        """Raise TeacherError for the first row of `bad`, [M] or [M, any] bool, with its position in its response."""
        if not bad.any():
            return
        bad_rows = np.flatnonzero(bad if bad.ndim == 1 else bad.any(1))
        ends = np.cumsum(self.n_rows)
        index = int(np.searchsorted(ends, bad_rows[0], side="right"))
        start = int(ends[index]) - self.n_rows[index]
        n_bad = int(np.searchsorted(bad_rows, ends[index]))
        position = int(bad_rows[0]) - start
        mask = self.own[index] if self.own else None
        if mask is not None:
            position = int(np.flatnonzero(mask)[position])
        where = f"{self.names[index]}: response position {position}"
        raise TeacherError(f"{where} ({n_bad} rows): {problem}")


def check_topk(table: TopKTable, n_vocab: int, rows: Rows) -> None:
    """Raise if the rows are not of distributions over `n_vocab` ids.

    The tolerance of a row's mass is 1e-3 plus the effect of rounding its logprobs to float16: a logprob l changes by up
    to |l| / 2^11, so the mass changes by up to sum(p |l|) / 2^11. `sampled` is not checked, see `check_logprobs`.

    Args:
        n_vocab: ids must be below it.

    Raises:
        TeacherError: naming a bad sequence: wrong shape or dtype, NaN or infinity, an id out of range or repeated in a
            row, logprobs not descending, a tail outside [0, 1], a mass above 1, mass + tail != 1, a count outside 1..K,
            or entries other than NO_ID and -inf beyond a count.
    """
    check_layout(table, rows)
    if table.counts is None:
        _check_entries(rows, table.ids, table.logprobs, n_vocab)
    else:
        _check_counted_entries(rows, table, table.counts, n_vocab)
    _check_mass(rows, table.logprobs, table.tail)


def check_layout(table: TopKTable, rows: Rows) -> None:
    """Check shapes and dtypes. Raises TeacherError, which names the first sequence."""
    ids = table.ids
    logprobs = table.logprobs
    tail = table.tail
    counts = table.counts
    where = rows.names[0]
    n_rows = sum(rows.n_rows)
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


def check_logprobs(rows: Rows, logprobs: np.ndarray) -> None:
    """Raise TeacherError if these are not [M] float32 logprobs of the response tokens."""
    check_array(rows.names[0], "sampled", logprobs, (sum(rows.n_rows),), (np.float32,))
    rows.refuse(~np.isfinite(logprobs), "the response token's logprob is NaN or infinite")
    rows.refuse(logprobs > MASS_SLACK, "the response token's logprob is above 0")


def check_array(
    where: str, signal: str, array: np.ndarray, shape: Sequence[int | None], dtypes: Sequence[type[np.floating]]
) -> None:
    """Raise TeacherError if shape or dtype is another one; None in `shape`: any size."""
    fits = array.ndim == len(shape) and all(n in (None, size) for n, size in zip(shape, array.shape, strict=True))
    if not fits or array.dtype not in dtypes:
        kinds = " or ".join(dtype.__name__ for dtype in dtypes)
        expected = ", ".join("any" if n is None else str(n) for n in shape)
        raise TeacherError(f"{where}: {signal} is {array.dtype} {list(array.shape)}, expected {kinds} [{expected}]")


def _check_mass(rows: Rows, logprobs: np.ndarray, tail: np.ndarray) -> None:
    # A logprob far above 0 overflows to an infinite mass, which is refused as well.
    with np.errstate(over="ignore"):
        p = np.exp(logprobs)
        mass = p.sum(1)
    total = mass + tail
    slack = np.full(len(mass), MASS_SLACK)
    doubtful = ~((np.abs(total - 1) <= slack) & (mass <= 1 + slack))  # NaN is doubtful, too
    if doubtful.any():  # rare; the sum below costs more than all other checks
        slack[doubtful] -= _FP16_ROUNDING * (p[doubtful] * np.maximum(logprobs[doubtful], _MIN_FP16)).sum(1)
    heavy = ~(mass <= 1 + slack)
    rows.refuse(heavy, f"probability mass is {mass[heavy.argmax()]:.6g}, above 1")
    rows.refuse(~((tail >= 0) & (tail <= 1)), "the tail mass is outside [0, 1]")
    uneven = ~(np.abs(total - 1) <= slack)
    rows.refuse(uneven, f"listed mass plus tail mass is {total[uneven.argmax()]:.6g}, not 1")


def _check_entries(rows: Rows, ids: np.ndarray, logprobs: np.ndarray, n_vocab: int) -> None:
    """Check full rows: ids and logprobs [M, K]."""
    rows.refuse(~np.isfinite(logprobs), "a logprob is NaN or infinite")
    rows.refuse((ids < 0) | (ids >= n_vocab), f"a token id is outside [0, {n_vocab})")
    ordered = np.sort(ids, axis=1)
    rows.refuse(ordered[:, 1:] == ordered[:, :-1], "a token id is repeated")
    rows.refuse(logprobs[:, 1:] > logprobs[:, :-1], "logprobs are not descending")


def _check_counted_entries(rows: Rows, table: TopKTable, counts: np.ndarray, n_vocab: int) -> None:
    """Check rows of a mass target: the first `counts` entries are listed, the others are padding."""
    ids = table.ids
    logprobs = table.logprobs
    k = ids.shape[1]
    rows.refuse((counts < 1) | (counts > k), f"a count is outside 1 to {k}")
    listed = np.arange(k) < counts[:, None]  # [M, K]
    padding = (ids == NO_ID) & (logprobs == -np.inf)
    rows.refuse(~(listed | padding), "an entry beyond its row's count is not (-1, -inf)")
    # Replace the padding by unused ids and the last logprob, so that the checks of full rows apply.
    last = np.take_along_axis(logprobs, counts[:, None].astype(np.int64) - 1, axis=1)
    full_ids = np.where(listed, ids, n_vocab + np.arange(k))
    rows.refuse(listed & ~np.isfinite(logprobs), "a logprob is NaN or infinite")
    rows.refuse(listed & ((ids < 0) | (ids >= n_vocab)), f"a token id is outside [0, {n_vocab})")
    _check_entries(rows, full_ids, np.where(listed, logprobs, last), n_vocab + k)
