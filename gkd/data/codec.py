"""Encode prompts, rollouts and scores for other processes as a few arrays for all of them, not several for each.

A prompt for the engines has 24 bytes, and 4 per token, much less than pickled objects. The driver sends its tokens
once, for all its samples, and the teacher's prompt if there is one. The rows that environments read follow. Reference
answers and dataset responses are not sent.

Rollouts and scores of a chunk are pickled by column: pickling a short array costs as much as copying 100 kB, and each
sequence has three to six arrays that cross processes twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from itertools import chain
from typing import Any, TypeVar

import numpy as np

from gkd.errors import DataError
from gkd.types import Prompt

_MAX = 2**31 - 1
_NONE = np.zeros(0, np.int32)  # no prompt for the teacher; a real one has tokens
_COLUMNS = 6


def encode_prompts(prompts: Sequence[Prompt], prompt_indices: Sequence[int]) -> bytes:
    """Encode prompt ids, prompt indices, routes, and the tokens of the prompts and of the teacher's as int32, and rows.

    Raises:
        DataError: no prompts, or a value outside of [0, 2^31).
    """
    if not prompts:
        raise DataError("cannot encode an empty list of prompts")
    views = [_NONE if p.teacher_ids is None else p.teacher_ids for p in prompts]
    rows = [
        (p.prompt_id, index, len(p.token_ids), p.route, len(view), len(p.row or b""))
        for p, index, view in zip(prompts, prompt_indices, views, strict=True)
    ]
    numbers = np.concatenate([[len(rows)], np.ravel(rows), *(p.token_ids for p in prompts), *views])
    if int(numbers.min()) < 0 or int(numbers.max()) > _MAX:
        span = f"[{int(numbers.min())}, {int(numbers.max())}]"
        raise DataError(f"prompt ids, indices, routes and tokens are in {span}; the supported range is [0, {_MAX}].")
    return numbers.astype("<i4").tobytes() + b"".join(p.row or b"" for p in prompts)


def decode_prompts(data: bytes) -> tuple[list[Prompt], list[int]]:
    """Return (prompts, prompt indices) from `encode_prompts`.

    Raises:
        DataError: truncated or malformed data.
    """
    numbers = np.frombuffer(data, "<i4", count=len(data) // 4)
    n = int(numbers[0]) if len(numbers) else 0
    head = numbers[1 : 1 + _COLUMNS * n]
    rows = head[: len(head) // _COLUMNS * _COLUMNS].reshape(-1, _COLUMNS)
    n_tokens, n_bytes = int(rows[:, [2, 4]].sum(dtype=np.int64)), int(rows[:, 5].sum(dtype=np.int64))
    n_numbers = 1 + _COLUMNS * n + n_tokens
    is_whole = n >= 1 and len(rows) == n and 4 * n_numbers + n_bytes == len(data)
    if not is_whole or int(numbers[:n_numbers].min()) < 0:
        raise DataError(f"malformed prompt data: {len(data)} bytes for {n} prompts")
    ids = numbers[1 + _COLUMNS * n : n_numbers]
    parts = np.split(ids, np.cumsum(np.concatenate([rows[:, 2], rows[:, 4]]))[:-1])
    ends = (4 * n_numbers + np.cumsum(rows[:, 5], dtype=np.int64)).tolist()
    prompts = [
        Prompt(row[0], own, route=row[3], teacher_ids=view if row[4] else None, row=data[end - row[5] : end] or None)
        for row, own, view, end in zip(rows.tolist(), parts[:n], parts[n:], ends, strict=True)
    ]
    return prompts, rows[:, 1].tolist()


T = TypeVar("T")
_MOST_BYTES = 1 << 16  # limit of the mean bytes of an array; larger ones are not copied
# Makes the values of a column again: (function, arguments).
_Column = tuple[Callable[..., list[Any]], tuple[Any, ...]]


class ColumnList(list[T]):
    """A list of dataclasses that is pickled by column. Unpickled, the arrays of its items are views of joined ones."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _column_list, (_column(self),)


def _column_list(column: _Column) -> ColumnList[Any]:
    return ColumnList(_values(column))


def _values(column: _Column) -> list[Any]:
    restore, arguments = column
    return restore(*arguments)


def _column(values: Sequence[Any]) -> _Column:
    """Return the column of values, whatever they are."""
    kinds = set(map(type, values))
    kind = kinds.pop() if len(kinds) == 1 else None
    if kind is np.ndarray and _can_join(values):
        return _split, (np.concatenate(values), [len(value) for value in values])
    if kind is tuple:
        return _tuples, (_column(list(chain(*values))), [len(value) for value in values])
    if kind is not None and is_dataclass(kind):
        return _records, (kind, [_column([getattr(v, field.name) for v in values]) for field in fields(kind)])
    return list, (list(values),)


def _can_join(arrays: Sequence[np.ndarray]) -> bool:
    alike = len({(array.dtype, array.shape[1:]) for array in arrays}) == 1 and arrays[0].ndim > 0
    return alike and sum(array.nbytes for array in arrays) <= _MOST_BYTES * len(arrays)


def _tuples(column: _Column, lengths: Sequence[int]) -> list[tuple[Any, ...]]:
    return [tuple(part) for part in _split(_values(column), lengths)]


def _records(kind: type, columns: Sequence[_Column]) -> list[Any]:
    return list(map(kind, *map(_values, columns)))


def _split(joined: Any, lengths: Sequence[int]) -> list[Any]:
    parts, start = [], 0
    for length in lengths:
        parts.append(joined[start : start + length])
        start += length
    return parts
