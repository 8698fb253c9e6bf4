"""Vocabularies as byte strings: what the tokens of two tokenizers have in common.

A vocabulary is a list with the bytes of each token id. Sorted by them, the tokens that begin with some bytes are one
range. Two vocabularies share *nodes*: strings that are beginnings of tokens in both. Each token belongs to its longest
such string, so the sums of two distributions over the tokens of each node are distributions over the same outcomes.

A special token has no text. Those that mean the same in both models (the end of a response, and the pairs of
teacher.special_tokens) get a mark as their bytes: 0xFF, which UTF-8 does not have, and a number. All others have None.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from gkd.errors import DataError

MARK = b"\xff"
END = MARK + b"\x00"  # the mark of every end token
Vocab = Sequence[bytes | None]
REST = 0  # node of the tokens that share no beginning with the other vocabulary, and of special tokens without a pair
WHOLE, CLOSED, OPEN = range(3)  # kinds of `Units`
NO_BYTE = 256  # the value for `REST` in `Nodes.first_byte`


def token_bytes(tokenizer: Any) -> list[bytes | None]:
    """Return the bytes of each id of a tokenizer of Hugging Face; None for those that are part of no text.

    Supported are byte-level BPE (GPT-2, Llama 3, Qwen; also tokenizers that are converted from tiktoken), and
    SentencePiece with a token for each byte (Llama 2, Mistral, Gemma). Raises DataError: the tokenizer is of another
    kind, so the bytes of its tokens are not known.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise DataError("it has no tokenizer.json, and none can be made of its files")
    added = tokenizer.added_tokens_decoder
    special = {*tokenizer.all_special_ids, *(i for i, token in added.items() if token.special)}
    pieces: dict[str, int] = backend.get_vocab(with_added_tokens=False)
    n_ids = 1 + max([*pieces.values(), *added])
    bytes_of_id: list[bytes | None] = [None] * n_ids
    table = _byte_characters()
    hexadecimal = {f"<0x{byte:02X}>": bytes([byte]) for byte in range(256)}
    is_sentencepiece = all(piece in pieces for piece in hexadecimal)
    if is_sentencepiece:
        for piece, i in pieces.items():
            bytes_of_id[i] = hexadecimal.get(piece) or _spaced(piece)
    elif "ByteLevel" in _kinds(json.loads(backend.to_str())):
        for piece, i in pieces.items():
            if all(character in table for character in piece):
                bytes_of_id[i] = bytes(table[character] for character in piece)
    else:
        raise DataError("it is neither byte-level BPE nor SentencePiece with a token for each byte")
    for i, token in added.items():
        # SentencePiece's user-defined symbols are added tokens, too: Gemma's of several spaces are written as pieces.
        bytes_of_id[i] = _spaced(token.content) if is_sentencepiece else token.content.encode()
    # UTF-8 does not have the byte of the marks, so such a token is part of no text.
    return [None if i in special or MARK in (token or b"") else token for i, token in enumerate(bytes_of_id)]


def _spaced(piece: str) -> bytes:
    """Return the bytes of a piece of SentencePiece, which writes a space as U+2581."""
    return piece.replace("\u2581", " ").encode()


def _kinds(tokenizer: dict[str, Any]) -> set[str]:
    """Return the types of the pre-tokenizers and decoders in a tokenizer.json."""
    kinds = set[str]()
    pending = [tokenizer.get("pre_tokenizer"), tokenizer.get("decoder")]
    while pending:
        if part := pending.pop():
            kinds.add(part["type"])
            pending += [*part.get("pretokenizers", ()), *part.get("decoders", ())]
    return kinds


def _byte_characters() -> dict[str, int]:
    """Return the character of GPT-2 by which byte-level BPE writes each byte -> the byte."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    invisible = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + i): byte for i, byte in enumerate(invisible)}


class ByteVocab:
    """A vocabulary sorted by its bytes.

    Attributes:
        n: number of ids.
        order: [S] int64, the ids that have bytes, sorted by them.
        lengths: [n] int64, bytes of each id; 0 without bytes.
        text: [S, longest] uint8, the bytes of `order`, padded with zeros.
    """

    def __init__(self, tokens: Vocab) -> None:
        ranked = sorted((token, i) for i, token in enumerate(tokens) if token)
        self.n = len(tokens)
        self.tokens = tokens
        self.order = np.array([i for _, i in ranked], dtype=np.int64)
        self.lengths = np.array([len(token or b"") for token in tokens], dtype=np.int64)
        width = max(1, int(self.lengths.max(initial=1)))
        joined = b"".join(token.ljust(width, b"\0") for token, _ in ranked)
        self.text = np.frombuffer(joined, np.uint8).reshape(len(ranked), width)

    @cached_property
    def ranges(self) -> tuple[np.ndarray, np.ndarray]:
        """Return for each beginning of each token which tokens have it, as places in `order`.

        Returns:
            [n + 1] int64, where the beginnings of an id start; [sum of lengths, 2] int64, first and last place + 1, of
            its beginnings of 1, 2, ... bytes.
        """
        starts = np.concatenate([[0], np.cumsum(self.lengths)])
        bounds = np.zeros((int(starts[-1]), 2), np.int64)
        sizes = self.lengths[self.order]
        place = np.arange(len(self.order))
        equal = np.ones(len(place), bool)  # the token before has the same first bytes
        equal[:1] = False
        for depth in range(1, self.text.shape[1] + 1):
            column = self.text[:, depth - 1]
            long = sizes >= depth
            equal[1:] &= (column[1:] == column[:-1]) & long[1:] & long[:-1]
            group = np.cumsum(~equal)  # a token that is too short is a group of its own
            first = np.flatnonzero(~equal)
            last = np.append(first[1:], len(place))
            bound_rows = starts[self.order[long]] + depth - 1
            bounds[bound_rows, 0] = first[group[long] - 1]
            bounds[bound_rows, 1] = last[group[long] - 1]
        return starts, bounds


def alike(vocab: ByteVocab, node: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return for each token which tokens of its node, [V], begin with it.

    Returns:
        [S] int64, the tokens with bytes by node and bytes; [V, 2] int64, first and last place + 1 in it, of each token
        the ones that begin with it; equal for tokens without bytes.
    """
    starts, bounds = vocab.ranges
    place = np.zeros(vocab.n, np.int64)
    place[vocab.order] = np.arange(len(vocab.order))
    # The tokens of each node, by their bytes: those that begin with one token are a range there, too.
    by_node = vocab.order[np.argsort(node[vocab.order], kind="stable")]
    key = node[by_node] * (len(vocab.order) + 1) + place[by_node]
    whole = np.where(vocab.lengths > 0, starts[1:] - 1, 0)  # places of whole tokens in `bounds`
    range_of = np.searchsorted(key, node[:, None] * (len(vocab.order) + 1) + bounds[whole])
    range_of[vocab.lengths == 0] = 0
    return by_node, range_of


class Nodes(NamedTuple):
    """The strings that are beginnings of tokens in two vocabularies."""

    student: np.ndarray  # [V] int64, the node of each of the student's ids
    teacher: np.ndarray  # [V_teacher] int64
    first_byte: np.ndarray  # [W] int64, of the node's string; `NO_BYTE` for `REST`
    lengths: np.ndarray  # [W] int64, bytes of the node's string; 0 for `REST`
    strings: list[bytes]  # one for each node; empty for `REST`

    @property
    def n(self) -> int:
        return len(self.lengths)


class Units(NamedTuple):
    """Sets of the teacher's tokens whose sums it lists in place of tokens; all of a set belong to one node.

    A node has up to three units: its string as a token (`WHOLE`), the longer tokens of which each is the beginning of
    no other (`CLOSED`), and those that may begin a longer one (`OPEN`). How a longer token goes on is not known: a mark
    stands for it.
    """

    of_token: np.ndarray  # [V_teacher] int32
    vocab: Vocab  # bytes of each unit: the node's string, of longer tokens with a mark behind it; None: of `REST`
    node: np.ndarray  # [U] int64
    kind: np.ndarray  # [U] int64, `WHOLE`, `CLOSED` or `OPEN`


def units_of(teacher: Vocab, nodes: Nodes) -> Units:
    """Return the units of a teacher's tokens."""
    tokens = ByteVocab(teacher)
    _, range_of = alike(tokens, nodes.teacher)
    kind_of_token = np.where(range_of[:, 1] - range_of[:, 0] <= 1, CLOSED, OPEN)
    kind_of_token[tokens.lengths == nodes.lengths[nodes.teacher]] = WHOLE
    kind_of_token[nodes.teacher == REST] = OPEN
    unit_keys, of_token = np.unique(nodes.teacher * 3 + kind_of_token, return_inverse=True)
    node = unit_keys // 3
    kind = unit_keys % 3
    strings = [nodes.strings[i] + (b"" if k == WHOLE else MARK) for i, k in zip(node, kind, strict=True)]
    vocab = [None if i == REST else string for i, string in zip(node, strings, strict=True)]
    return Units(of_token.astype(np.int32), vocab, node, kind)


def common_nodes(student: Vocab, teacher: Vocab) -> Nodes:
    """Return the nodes of two vocabularies.

    If only tokens of one vocabulary would belong to a string, they belong to the next shorter one. Otherwise a
    divergence would compare mass with an outcome that the other model cannot have.
    """
    beginnings = [_longest_beginnings(student, teacher), _longest_beginnings(teacher, student)]
    holders: list[dict[bytes, list[int]]] = [defaultdict(list), defaultdict(list)]
    for side, strings in zip(holders, beginnings, strict=True):
        for i, string in enumerate(strings):
            side[string].append(i)
    node = {b"": REST}
    by_length: dict[int, set[bytes]] = defaultdict(set)
    for string in holders[0].keys() | holders[1].keys():
        by_length[len(string)].add(string)
    for length in range(max(by_length), 0, -1):
        for string in sorted(by_length[length]):
            if all(string in side for side in holders):
                node[string] = len(node)
                continue
            shorter = string[:-1]  # it begins tokens of both, too
            by_length[length - 1].add(shorter)
            for side in holders:
                if string in side:
                    side[shorter] += side.pop(string)
    maps = [np.zeros(len(vocab), np.int64) for vocab in (student, teacher)]
    for side, ids in zip(holders, maps, strict=True):
        for string, members in side.items():
            ids[members] = node[string]
    strings = list(node)
    first = [string[0] if string else NO_BYTE for string in strings]
    sizes = [len(string) for string in strings]
    return Nodes(maps[0], maps[1], np.array(first, np.int64), np.array(sizes, np.int64), strings)


def _longest_beginnings(tokens: Vocab, other: Vocab) -> list[bytes]:
    """Return the longest beginning of each token that begins a token of the other vocabulary, too."""
    beginnings = {token[:n] for token in other if token for n in range(1, len(token) + 1)}
    longest = []
    for token in tokens:
        token = token or b""
        n = len(token)
        while n and token[:n] not in beginnings:
            n -= 1
        longest.append(token[:n])
    return longest
