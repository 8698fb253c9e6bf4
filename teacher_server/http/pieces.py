"""Write a large answer in pieces, so that neither its JSON nor its Python objects are in memory as a whole."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterable, Iterator, Sequence

import msgspec

HOLE = secrets.token_hex(16)  # stands in a small JSON for a large part; no client can guess it
_ROWS = 64  # rows of a piece
_encoder = msgspec.json.Encoder()


def rows_json(rows: Iterable[object], first: object = None) -> Iterator[bytes]:
    """Yield the JSON list of the first token's entry, which has no logprob, and the rows."""
    yield b"[" + _encoder.encode(first)
    rows = iter(rows)
    while block := list(itertools.islice(rows, _ROWS)):
        yield b"," + _encoder.encode(block)[1:-1]
    yield b"]"


def fill(shell: object, parts: Sequence[Iterable[bytes]]) -> Iterator[bytes]:
    """Yield the JSON of `shell` with each `HOLE`, in order, replaced by its part."""
    texts = _encoder.encode(shell).split(_encoder.encode(HOLE))
    for text, part in zip(texts, [*parts, ()], strict=True):
        yield text
        yield from part
