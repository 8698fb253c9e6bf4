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


def _encoded(value: Any) -> bytes:
    """Return the bytes of an image, or of token ids as int32."""
    return value.data if isinstance(value, EncodedImage) else value.astype(np.int32).tobytes()


def _decoded(kind: type, data: bytes) -> Any:
    """Do the inverse of `_encoded` for a field of this type."""
    return EncodedImage(data) if kind is EncodedImage else np.frombuffer(data, np.int32)


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_encoded)
_DECODER = msgspec.msgpack.Decoder(list[tuple[int, Prompt]], dec_hook=_decoded)


def encode_prompts(prompts: Sequence[Prompt], prompt_indices: Sequence[int]) -> bytes:
    """Encode prompts with their indices in the batch, without what only the driver needs."""
    sent = [msgspec.structs.replace(prompt, answer=None, response_ids=None, own=None) for prompt in prompts]
    return _ENCODER.encode(list(zip(prompt_indices, sent, strict=True)))


def decode_prompts(data: bytes) -> tuple[list[Prompt], list[int]]:
    """Return (prompts, prompt indices) from `encode_prompts`.

    Raises:
        DataError: truncated or malformed data.
    """
    try:
        rows = _DECODER.decode(data)
    except msgspec.DecodeError as error:
        raise DataError(f"malformed prompt data: {error}") from error
    return [prompt for _, prompt in rows], [index for index, _ in rows]


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
    arrays = []
    start = 0
    for length in lengths:
        arrays.append(joined[start : start + length])
        start += length
    return arrays
