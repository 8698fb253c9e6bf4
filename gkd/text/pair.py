"""Align a response in the tokens of two tokenizers, by its bytes.

The teacher scores the text of the student's response in its own tokens. Both token sequences then have the same bytes,
up to where the text ends for one of them: at a special token without a pair, or at bytes that are not UTF-8 or that the
teacher's tokenizer changes. What follows has no pair, and no loss.

    student      | 12 | 3  | end |         rows 0 1 2
    teacher      | 1  | 23 | end |         rows 0 1 2
    byte             0   1   2   end
    boundary         both  - - both        `Alignment.is_common`

A *position* is a byte of the common text; a mark of a special token is one position. Both models predict what comes at
it: from the row of the token that holds the byte, given the bytes of that token in front of it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from gkd.text.byte_vocab import END, MARK, Nodes, Units, Vocab, common_nodes, units_of
from gkd.text.comparison import Comparison
from gkd.types import Rollout, TeacherScores

_MARKS = re.compile(re.escape(MARK) + b"(.)", re.DOTALL)


class Alignment(NamedTuple):
    """Positions of one response, in the order of its bytes; P of them."""

    row: np.ndarray  # [P] int64, the student's token that holds the byte, counted from 0 in the response
    depth: np.ndarray  # [P] int64, bytes of that token in front of it; 0: the token begins here
    teacher_row: np.ndarray  # [P] int64
    teacher_depth: np.ndarray  # [P] int64
    # [P] int64, the position at which two tokens begin that nodes compare up to behind this byte; -1: there is none.
    cover: np.ndarray

    @property
    def is_common(self) -> np.ndarray:
        """Return [P] bool, whether a token of each sequence begins here."""
        common: np.ndarray = (self.depth == 0) & (self.teacher_depth == 0)
        return common


@dataclass(frozen=True)
class TokenizerPair(Comparison):
    """Compare the texts of two tokenizers, in a form that any process can use without loading a model folder.

    Attributes:
        student, teacher: bytes of each token id, see `gkd.text.byte_vocab`; None also for ids from the model's number
            of rows on.
        student_json, teacher_json: their tokenizer.json.
        end: the teacher's id that ends a response.
        max_tokens: of prompt and response together, that the teacher takes.
        by_units: the teacher lists units in place of tokens (teacher.signal units).
        with_nodes: distill.units is nodes; otherwise all positions are compared by the next byte.
        unpaired: tables without rows, of a response that has no token of the teacher.
    """

    ids = "student"

    student: Vocab
    teacher: Vocab
    student_json: str
    teacher_json: str
    end: int
    max_tokens: int
    by_units: bool = False
    with_nodes: bool = True
    unpaired: TeacherScores = TeacherScores()

    def __getstate__(self) -> dict[str, object]:
        return {name: self.__dict__[name] for name in self.__dataclass_fields__}  # without what is computed

    @cached_property
    def nodes(self) -> Nodes:
        return common_nodes(self.student, self.teacher)

    @cached_property
    def units(self) -> Units | None:
        """Return what the teacher's lists have in place of its tokens; None if they have tokens."""
        return units_of(self.teacher, self.nodes) if self.by_units else None

    @property
    def n_vocab(self) -> int:
        return len(self.student)

    @property
    def n_listed(self) -> int:
        return len(self.teacher) if self.units is None else len(self.units.vocab)

    @property
    def unit_of_token(self) -> np.ndarray | None:
        return None if self.units is None else self.units.of_token

    @cached_property
    def _encoders(self) -> tuple[_Encoder, _Encoder]:
        return _Encoder(self.student_json, self.student), _Encoder(self.teacher_json, self.teacher)

    @cached_property
    def _special(self) -> dict[bytes, int]:
        """Return the teacher's id of each mark."""
        marks = {token: i for i, token in enumerate(self.teacher) if token and token.startswith(MARK) and token != MARK}
        return marks | {END: self.end}

    def for_teacher(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """See `Comparison.for_teacher`. Responses are cut where the teacher's limit is, and may be empty."""
        texts = []
        for rollout, sequence in zip(rollouts, super().for_teacher(rollouts), strict=True):
            ids = self.teacher_ids(rollout.response_ids)[: max(0, self.max_tokens - len(sequence.prompt_ids))]
            texts.append(replace(sequence, response_ids=ids))
        return texts

    def completed(self, scores: Mapping[int, TeacherScores], texts: Sequence[Rollout]) -> dict[int, TeacherScores]:
        """See `Comparison.completed`; all have the teacher's tokens."""
        return {
            i: replace(scores.get(i, self.unpaired), response_ids=text.response_ids) for i, text in enumerate(texts)
        }

    def text_columns(self, rollouts: Sequence[Rollout], scores: Sequence[TeacherScores]) -> list[np.ndarray]:
        """See `Comparison.text_columns`; the scores have `response_ids`."""
        tables: list[tuple[np.ndarray, ...]] = []
        n_rows = n_teacher_rows = n_positions = 0
        responses = [score.response_ids for score in scores if score.response_ids is not None]
        for rollout, response in zip(rollouts, responses, strict=True):
            at = self.align(rollout.response_ids, response)
            cover = np.where(at.cover < 0, -1, at.cover + n_positions)
            is_first = np.arange(len(at.row)) == 0
            teacher_row = at.teacher_row + n_teacher_rows
            tables.append((at.row + n_rows, at.depth, teacher_row, at.teacher_depth, cover, is_first))
            n_rows += rollout.n_own
            n_positions += len(at.row)
            n_teacher_rows += len(response)
        columns = [np.concatenate(column) for column in zip(*tables, strict=True)]
        ids = np.concatenate(responses)
        if self.units is not None:
            ids = self.units.of_token[ids]
        canonical = np.concatenate([self.canonical(r.response_ids) & r.on_policy for r in rollouts])
        return [*columns, ids.astype(np.int64), canonical]

    def teacher_ids(self, response: np.ndarray) -> np.ndarray:
        """Return the teacher's tokens, [R'] int32, of the student's, [R], as far as they have the same bytes."""
        text = self._text(response)
        ids: list[int] = []
        encoder = self._encoders[1]
        begin = 0
        for mark in [*_MARKS.finditer(text), None]:
            piece, is_whole = encoder.encode(text[begin : mark.start() if mark else None])
            ids += piece
            if not is_whole or mark is None:
                break
            ids.append(self._special[mark.group()])
            begin = mark.end()
        return np.array(ids, np.int32)

    def canonical(self, response: np.ndarray) -> np.ndarray:
        """Return whether the student's tokenizer makes each token of the text in front of the first special token.

        The result is [R] bool, and True for tokens behind that text.
        """
        pieces: list[bytes] = []
        for token in response.tolist():
            part = self.student[token]
            if part is None or part.startswith(MARK):
                break
            pieces.append(part)
        ids, _ = self._encoders[0].encode(b"".join(pieces))
        begins = {0, *np.cumsum([len(self.student[token] or b"") for token in ids]).tolist()}
        ends = np.cumsum([len(part) for part in pieces], dtype=np.int64)
        is_canonical = np.ones(len(response), bool)
        places = [end - len(part) in begins and end in begins for end, part in zip(ends.tolist(), pieces, strict=True)]
        is_canonical[: len(pieces)] = places
        is_canonical[: len(pieces)] |= ends > max(begins)  # bytes behind the text
        return is_canonical

    def align(self, response: np.ndarray, teacher_ids: np.ndarray) -> Alignment:
        """Return the positions of the bytes that the student's tokens, [R], and those of `teacher_ids`, [R'], have."""
        nodes = self.nodes
        places = *_places(self.student, response), *_places(self.teacher, teacher_ids)
        n = min(map(len, places))
        row, depth, teacher_row, teacher_depth = (part[:n] for part in places)
        covered = np.zeros(n, np.int64)  # at common boundaries: bytes that the nodes of both tokens have
        common = np.flatnonzero((depth == 0) & (teacher_depth == 0))
        lengths = nodes.lengths[nodes.student[response[row[common]]]]
        teacher_lengths = nodes.lengths[nodes.teacher[teacher_ids[teacher_row[common]]]]
        covered[common] = np.minimum(lengths, teacher_lengths)
        before = np.zeros(n, np.int64)
        before[common] = common
        before = np.maximum.accumulate(before)
        rows = np.arange(n)
        cover = np.where((rows > before) & (rows - before < covered[before]), before, -1)
        return Alignment(row, depth, teacher_row, teacher_depth, cover)

    def _text(self, response: np.ndarray) -> bytes:
        """Return the bytes of a response up to the first token that has none."""
        pieces = []
        for token in response.tolist():
            part = self.student[token]
            if part is None:
                break
            pieces.append(part)
        return b"".join(pieces)


def _places(vocab: Vocab, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the token and the place in it of each byte of a sequence, up to the first token without bytes.

    A mark is one position: its number has none.
    """
    sizes = []
    for token in ids.tolist():
        part = vocab[token]
        if part is None:
            break
        sizes.append(1 if part.startswith(MARK) else len(part))
    row = np.repeat(np.arange(len(sizes)), np.array(sizes, np.int64))
    starts = np.cumsum([0, *sizes])
    return row, np.arange(len(row)) - starts[row]


class _Encoder:
    """Encode bytes so that the tokens have exactly these bytes."""

    def __init__(self, json_text: str, tokens: Vocab) -> None:
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_str(json_text)
        self._tokens = tokens
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        # SentencePiece may put a space in front of a text. So a text follows a control character there, which is a
        # token of its own: that of its byte.
        self._anchor = "" if self._bytes(self._ids("a")) == b"a" else "\x01"

    def encode(self, text: bytes) -> tuple[list[int], bool]:
        """Return the tokens of the longest beginning of a text that they reproduce, and whether that is all of it."""
        try:
            decoded = text.decode()
        except UnicodeDecodeError as error:
            decoded = text[: error.start].decode()
        ids = self._ids(self._anchor + decoded)
        if self._anchor:
            ids = self._behind_anchor(ids)
        offset = 0
        for i, token in enumerate(ids):
            part = self._tokens[token] if token < len(self._tokens) else None  # the model has no row for it
            if part is None or not text.startswith(part, offset):
                return ids[:i], False
            offset += len(part)
        return ids, offset == len(text)

    def _behind_anchor(self, ids: list[int]) -> list[int]:
        """Return the tokens behind the anchor."""
        for i in range(1, len(ids) + 1):
            if self._bytes(ids[:i]).endswith(self._anchor.encode()):
                return ids[i:]
        return []

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def _bytes(self, ids: list[int]) -> bytes:
        return b"".join(self._tokens[token] or b"" for token in ids if token < len(self._tokens))
