"""Encode prompts, rollouts and scores for other processes as a few arrays for all of them, not several for each.

A prompt for the engines has at most 24 bytes, and 4 per token, much less than pickled objects. The driver sends its
tokens once, for all its samples, the teacher's prompt if there is one, and the row that environments read. Reference
answers and dataset responses are not sent.

Rollouts and scores of a chunk are pickled by column: pickling a short array costs as much as copying 100 kB, and each
sequence has three to six arrays that cross processes twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from itertools import chain
from typing import Any, TypeVar

import msgspec
import numpy as np

from gkd.errors import DataError
from gkd.types import Prompt
from teacher_server.vision.images import EncodedImage


class _Sent(msgspec.Struct, array_like=True):
    """A prompt and its index in the batch, as the engines receive it. Token ids are the bytes of int32."""

    prompt_id: int
    index: int
    route: int
    token_ids: bytes
    teacher_ids: bytes | None
    row: bytes | None
    images: tuple[bytes, ...] = ()


_DECODER = msgspec.msgpack.Decoder(list[_Sent])


def encode_prompts(prompts: Sequence[Prompt], prompt_indices: Sequence[int]) -> bytes:
    """Encode prompt ids, prompt indices, routes, the tokens of the prompts and of the teacher's, and rows."""
    sent = []
    for p, index in zip(prompts, prompt_indices, strict=True):
        view = None if p.teacher_ids is None else p.teacher_ids.astype(np.int32).tobytes()
        images = tuple(image.data for image in p.images)
        sent.append(_Sent(p.prompt_id, index, p.route, p.token_ids.astype(np.int32).tobytes(), view, p.row, images))
    return msgspec.msgpack.encode(sent)


def decode_prompts(data: bytes) -> tuple[list[Prompt], list[int]]:
    """Return (prompts, prompt indices) from `encode_prompts`.

    Raises:
        DataError: truncated or malformed data.
    """
    try:
        sent = _DECODER.decode(data)
    except msgspec.DecodeError as error:
        raise DataError(f"malformed prompt data: {error}") from error
    prompts = []
    for each in sent:
        view = None if each.teacher_ids is None else np.frombuffer(each.teacher_ids, np.int32)
        ids = np.frombuffer(each.token_ids, np.int32)
        images = tuple(map(EncodedImage, each.images))
        prompts.append(Prompt(each.prompt_id, ids, route=each.route, teacher_ids=view, row=each.row, images=images))
    return prompts, [each.index for each in sent]


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
