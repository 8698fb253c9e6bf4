"""Describe what a request of any dialect asks for, and the error that refuses it; write a large answer in pieces.

So neither the JSON of an answer nor its Python objects are in memory as a whole.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
import numpy as np

from teacher_server.wire.protocol import MAX_ENTRIES, MAX_ID
from teacher_server.wire.table import TopKTable

MAX_K = 1024  # most entries of a row
TokenId = Annotated[int, msgspec.Meta(ge=0, le=MAX_ID)]
_ONLY = "this server scores given tokens and generates none"


class Refusal(Exception):
    """A request that is answered with an HTTP status of 400 or more. The text names what was found and what to do."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


@dataclass(frozen=True, slots=True)
class Wanted:
    """The rows of one sequence that predict its tokens from `start` on. Raises Refusal if K is out of range.

    Args:
        k_field: the dialect's name of K.
        ids: [N] int32
        start: first scored token, at least 1: no row predicts the first token.
        k: most probable entries of each row; 0: only the token itself.
    """

    k_field: str
    ids: np.ndarray
    start: int
    k: int
    temperature: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.k <= MAX_K:
            raise Refusal(400, f"{self.k_field} = {self.k}: a row has 0 to {MAX_K} entries. Fix: choose one of these.")

    @property
    def depth(self) -> int:
        """Return the entries of a row on the wire."""
        return max(1, self.k)


@dataclass(frozen=True, slots=True)
class Question:
    """A request: the teacher, the sequences, and a function of scores and the teacher's name that yields the JSON.

    Raises:
        Refusal: the answer would be too large.
    """

    model: str  # name of a teacher or its model; may be empty if there is only one
    wanted: Sequence[Wanted]
    write: Callable[[Sequence[TopKTable], str], Iterator[bytes]]  # in pieces

    def __post_init__(self) -> None:
        n_entries = sum((len(sequence.ids) - sequence.start) * sequence.depth for sequence in self.wanted)
        if n_entries > MAX_ENTRIES:
            size = f"{len(self.wanted)} sequences with {n_entries} entries in all: an answer has at most {MAX_ENTRIES}"
            raise Refusal(400, f"{size}. Fix: send fewer sequences in a request, or ask for fewer entries of a row.")


@dataclass(frozen=True, slots=True)
class Dialect:
    """A form of requests and errors. `read` raises Refusal and msgspec.DecodeError."""

    read: Callable[[bytes], Question]
    error: Callable[[int, str], Mapping[str, object]]  # (status, text) -> JSON


def sequences_of(field: str, value: str | Sequence[str | int | list[int]]) -> list[np.ndarray]:
    """Return [N] int32 of each sequence in one list of ids or a list of such lists. Raises Refusal."""
    items: Sequence[object] = [value] if isinstance(value, str) else value
    if any(isinstance(item, str) for item in items):
        raise Refusal(400, f"{field} is text or missing: this server has no tokenizer. Fix: send the token ids.")
    if items and all(isinstance(item, int) for item in items):
        items = [items]
    if not items or not all(isinstance(item, list | tuple) for item in items):
        raise Refusal(400, f"{field}: neither a list of token ids nor a list of such lists. Fix: send one of the two.")
    sequences = [np.array(item, np.int32) for item in items]
    for index, ids in enumerate(sequences):
        if len(ids) < 2:
            problem = f"{field}, sequence {index}, has {len(ids)} tokens: no token has one before it"
            raise Refusal(400, f"{problem}. Fix: send 2 or more.")
    return sequences


def check_generation(field: str, n_tokens: int | None, refused: Mapping[str, object]) -> None:
    """Raise Refusal for a request for more than one new token, or for what else this server does not compute.

    Args:
        n_tokens: the request's limit of new tokens; None is a default above 1.
        refused: fields that have to be absent or false; `n` may be 1.
    """
    if n_tokens is None or not 0 <= n_tokens <= 1:
        shown = "missing" if n_tokens is None else n_tokens
        raise Refusal(400, f"{field} = {shown}: {_ONLY}. Fix: {field} = 0 or 1.")
    for name, value in refused.items():
        if not (value is None or value is False or (name == "n" and value == 1)):
            raise Refusal(400, f"{name} = {value!r:.60}: {_ONLY}. Fix: leave {name} out.")


HOLE = secrets.token_hex(16)  # stands in a small JSON for a large part; no client can guess it
_ROWS = 64  # rows of a piece


def rows_json(rows: Iterable[object], first: object = None) -> Iterator[bytes]:
    """Yield the JSON list of the first token's entry, which has no logprob, and the rows."""
    yield b"[" + msgspec.json.encode(first)
    rows = iter(rows)
    while block := list(itertools.islice(rows, _ROWS)):
        yield b"," + msgspec.json.encode(block)[1:-1]
    yield b"]"


def fill(shell: object, streams: Sequence[Iterable[bytes]]) -> Iterator[bytes]:
    """Yield the JSON of `shell` with each `HOLE`, in order, replaced by its part."""
    texts = msgspec.json.encode(shell).split(msgspec.json.encode(HOLE))
    for text, part in zip(texts, [*streams, ()], strict=True):
        yield text
        yield from part
