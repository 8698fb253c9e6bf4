"""Scatter the sequences of chunks over data-parallel groups or ranks, select them there, and gather the results.

    driver    scatter_to_groups | scatter_to_ranks    which sequences of which chunk
    call      ChunkInputs                             the sequences and their chunks, of one rank
    rank      select | map_selected                   those sequences, out of the chunks
    host      gather_results                          the results of several ranks, in the order of the chunk

A selection is always called `sequence_indices`: the positions of the sequences in the list that the chunk's handle
names, as little-endian int32 bytes; None selects the whole list. A batch may have several parts of one list.
- Positions, because they index a chunk's rollouts, scores and reference logprobs alike. A `sample_index` does not: two
  chunks may have the same ones (of two evaluations), and sorting results by it does not restore a chunk's order.
- Bytes, because a pickled array has 100 bytes and more of its own, and a chunk may have a single sequence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice, zip_longest
from typing import Any, Self, TypeVar

import numpy as np

from gkd.errors import DataError
from gkd.types import Rollout, RolloutChunk, ScoredChunk, TeacherScores

_INDEX = "<i4"
_NUMBER = "<f4"
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class GroupPart:
    """The sequences of one chunk that one data-parallel group trains on."""

    chunk: ScoredChunk
    sequence_indices: bytes | None
    numbers: bytes | None = None  # numbers of these sequences, as in `ScoredChunk`


@dataclass(frozen=True, slots=True)
class RankPart:
    """The sequences of one chunk that one rank computes something for."""

    chunk_index: int  # index in the list of chunks that was scattered
    sequence_indices: bytes | None


@dataclass(frozen=True, slots=True)
class ChunkInputs:
    """A data-parallel group's part of a batch, as arguments of a Ray call: of each chunk the sequences and the lists.

    On the driver, Ray handles stand in the place of the lists of rollouts, scores and reference logprobs.
    """

    indices: Sequence[bytes | None]  # the group's sequences in each chunk, see the module
    rollouts: Sequence[list[Rollout]]
    scores: Sequence[list[TeacherScores]] = ()  # empty except on the last pipeline stage, which computes the loss
    # [R] float32 of each sequence, or None for one that is not trained on; a chunk's last ones may be left out. Empty
    # where `scores` are, and without a reference.
    reference: Sequence[list[np.ndarray | None]] = ()
    numbers: Sequence[bytes] = ()  # numbers of the group's sequences, as in `ScoredChunk`; empty: none needed

    @classmethod
    def of_parts(cls, group_parts: Sequence[GroupPart], *, is_last_stage: bool) -> Self:
        """Return the inputs, with handles, of a rank whose data-parallel group has these parts."""
        chunks = [part.chunk for part in group_parts]
        scored = chunks if is_last_stage else []
        return cls(
            [part.sequence_indices for part in group_parts],
            [chunk.rollouts.ref for chunk in chunks],
            [chunk.ref for chunk in scored],
            [chunk.reference for chunk in scored if chunk.reference is not None],
            [part.numbers for part in group_parts if part.numbers is not None],
        )

    def to_args(self) -> list[Any]:
        """Return the arguments of a Ray call. Ray resolves a handle only if it is an argument, not a part of one."""
        lists = (self.rollouts, self.scores, self.reference)
        return [(self.indices, self.numbers, [len(of_kind) for of_kind in lists]), *chain(*lists)]

    @classmethod
    def of_args(cls, head: tuple[Any, ...], *lists: list[Any]) -> Self:
        """Return the inputs whose `to_args` were passed; Ray has resolved the handles."""
        indices, numbers, sizes = head
        rest = iter(lists)
        rollouts, scores, reference = ([*islice(rest, size)] for size in sizes)
        return cls(indices, rollouts, scores, reference, numbers)

    def scores_with_reference(self) -> Sequence[list[TeacherScores]]:
        """Return the scores of each chunk with the reference logprobs of the same sequences.

        Raises:
            DataError: a chunk has more reference logprobs than scores.
        """
        if not self.reference:
            return self.scores
        sizes = [len(chunk) for chunk in self.scores], [len(chunk) for chunk in self.reference]
        if any(n < m for n, m in zip(*sizes, strict=True)):
            raise DataError(f"chunks of {sizes[0]} scored sequences have reference logprobs of {sizes[1]}")
        return [
            [replace(score, reference_logprobs=logprobs) for score, logprobs in zip_longest(scored, chunk)]
            for scored, chunk in zip(self.scores, self.reference, strict=True)
        ]


def encode_part(chunk: RolloutChunk, positions: np.ndarray | None = None) -> bytes | None:
    """Return the `sequence_indices` of some sequences of a chunk.

    Args:
        positions: [n] in the chunk's own order, distinct and ascending; None means all.
    """
    if positions is None:
        positions = np.arange(chunk.n_sequences)
    if chunk.sequence_indices is not None:
        return chunk.sequence_indices[positions].astype(_INDEX).tobytes()
    return None if len(positions) == chunk.n_sequences else positions.astype(_INDEX).tobytes()


def decode_indices(sequence_indices: bytes | None, n_sequences: int) -> list[int]:
    """Return the positions in a chunk of `n_sequences`. Raises DataError: a position is outside of the chunk."""
    if sequence_indices is None:
        return list(range(n_sequences))
    indices: list[int] = np.frombuffer(sequence_indices, _INDEX).tolist()
    if missing := [i for i in indices if not 0 <= i < n_sequences]:
        raise DataError(f"sequence_indices {missing} are not in their chunk, which has {n_sequences} sequences")
    return indices


def scatter_to_groups(
    batch: Sequence[ScoredChunk], dp_size: int, attention_length: float = math.inf, *, in_step: bool = False
) -> list[list[GroupPart]]:
    """Return, by data-parallel group, its parts of the chunks that it has any sequence of, in the order of `batch`.

    Sequences leave the group that they were generated for if this evens out the work of the groups, see `work`. With
    `in_step` the groups wait for each other in each micro-batch, not only at the end of the batch: equal tokens then
    give them equally many micro-batches, and long sequences are dealt so that these have about the same work.
    """
    chunks = [c.rollouts for c in batch]
    n_sequences = [chunk.n_sequences for chunk in chunks]
    samples = _joined([chunk.sample_index for chunk in chunks])
    group_of = np.repeat(np.array([chunk.dp_rank for chunk in chunks], np.int32), n_sequences)
    lengths = n_tokens = _joined([chunk.n_tokens for chunk in chunks])
    if in_step:
        _deal(group_of, n_tokens, samples, dp_size, attention_length / 4)  # attention is a fifth of the work
    else:
        lengths = work(n_tokens, attention_length)
    groups = [np.flatnonzero(group_of == group) for group in range(dp_size)]
    order = np.argsort(samples)
    for group, group_samples in enumerate(even_groups([samples[g] for g in groups], [lengths[g] for g in groups])):
        group_of[order[np.searchsorted(samples, group_samples, sorter=order)]] = group
    group_parts: list[list[GroupPart]] = [[] for _ in range(dp_size)]
    for chunk, owners in zip(batch, np.split(group_of, np.cumsum(n_sequences)[:-1]), strict=True):
        for group in sorted(set(owners.tolist())):  # faster than np.unique for a chunk
            positions = np.flatnonzero(owners == group)
            numbers = None if chunk.numbers is None else chunk.numbers[positions].astype(_NUMBER).tobytes()
            group_parts[group].append(GroupPart(chunk, encode_part(chunk.rollouts, positions), numbers))
    return group_parts


def scatter_to_ranks(
    chunks: Sequence[RolloutChunk], n_ranks: int, attention_length: float = math.inf
) -> list[list[RankPart]]:
    """Return, by rank, the parts of the chunks that it computes, with about the same work for each rank.

    The result does not depend on the composition of the chunks, which depends on timing. Sequences with neighboring
    sample indices stay together where possible, so that few chunks are split. For `attention_length` see `work`.
    """
    if not chunks:
        return [[] for _ in range(n_ranks)]
    order = np.argsort(_joined([chunk.sample_index for chunk in chunks]), kind="stable")
    n_tokens = work(_joined([chunk.n_tokens for chunk in chunks]), attention_length)[order]
    chunk_of = np.repeat(np.arange(len(chunks)), [chunk.n_sequences for chunk in chunks])[order]
    index_of = np.concatenate([np.arange(chunk.n_sequences) for chunk in chunks])[order]
    middle = n_tokens.cumsum() - n_tokens / 2
    first_guess = np.minimum(middle * n_ranks // n_tokens.sum(), n_ranks - 1)
    groups = [np.flatnonzero(first_guess == rank).astype(np.int32) for rank in range(n_ranks)]
    ranks: list[list[RankPart]] = []
    for members in even_groups(groups, [n_tokens[group] for group in groups]):
        rank_parts = []
        for i in np.unique(chunk_of[members]).tolist():
            rank_parts.append(RankPart(i, encode_part(chunks[i], np.sort(index_of[members[chunk_of[members] == i]]))))
        ranks.append(rank_parts)
    return ranks


def select(
    sequence_indices: Sequence[bytes | None],
    chunks: Sequence[list[Rollout]],
    scores: Sequence[list[TeacherScores]] | None,
) -> tuple[list[Rollout], list[TeacherScores] | None]:
    """Return the selected sequences of all chunks and their scores.

    Args:
        scores: by chunk, as the others; None on pipeline stages that compute no loss.

    Raises:
        DataError: a chunk lacks a selected sequence, or has a different number of rollouts and scores.
    """
    rollouts: list[Rollout] = []
    selected_scores: list[TeacherScores] = []
    for number, (selection, chunk) in enumerate(zip(sequence_indices, chunks, strict=True)):
        indices = decode_indices(selection, len(chunk))
        rollouts += [chunk[i] for i in indices]
        if scores is not None:
            if len(scores[number]) != len(chunk):
                raise DataError(f"a chunk of {len(chunk)} rollouts has scores of {len(scores[number])} sequences")
            selected_scores += [scores[number][i] for i in indices]
    return rollouts, None if scores is None else selected_scores


def with_numbers(rollouts: Sequence[Rollout], numbers: Sequence[bytes]) -> list[Rollout]:
    """Return the sequences of `select` with their advantages and factors; `numbers` are by part, see `GroupPart`.

    Raises:
        DataError: there are not two for each sequence.
    """
    values = np.frombuffer(b"".join(numbers), _NUMBER)
    if values.size != 2 * len(rollouts):
        raise DataError(f"a batch of {len(rollouts)} sequences has {values.size} advantages and factors")
    rows = zip(rollouts, values.reshape(-1, 2).tolist(), strict=True)
    return [replace(rollout, advantage=advantage, factor=factor) for rollout, (advantage, factor) in rows]


def map_selected(
    sequence_indices: Sequence[bytes | None],
    chunks: Sequence[list[Rollout]],
    compute: Callable[[list[Rollout]], Sequence[T]],
) -> list[list[T]]:
    """Return, by chunk, the result of `compute` for each selected sequence.

    `compute` is called once, with the sequences of all chunks; also with none, since it may be a collective. Raises
    DataError: a chunk lacks a selected sequence.
    """
    selected = [
        [chunk[i] for i in decode_indices(selection, len(chunk))]
        for selection, chunk in zip(sequence_indices, chunks, strict=True)
    ]
    results = iter(compute([rollout for part in selected for rollout in part]))
    return [[next(results) for _ in part] for part in selected]


def gather_results(sequence_indices: Sequence[bytes | None], results: Sequence[list[T]]) -> list[T | None]:
    """Return the results of one chunk at the places of its sequences in their list; None where no part has one.

    Args:
        sequence_indices: of each part.
        results: the results of `map_selected` for this chunk, by rank.

    Raises:
        DataError: a sequence has two results, or a part has not one for each of its sequences.
    """
    placed: dict[int, T] = {}
    for selection, part in zip(sequence_indices, results, strict=True):
        idx = range(len(part)) if selection is None else np.frombuffer(selection, _INDEX).tolist()
        if len(idx) != len(part) or not placed.keys().isdisjoint(idx):
            raise DataError(f"a part of a chunk has results of {len(part)} sequences for {list(idx)}; others have some")
        placed.update(zip(idx, part, strict=True))
    return [placed.get(i) for i in range(max(placed, default=-1) + 1)]


def _joined(tables: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.zeros(0, np.int32), *tables])


def work(n_tokens: np.ndarray, attention_length: float) -> np.ndarray:
    """Return the work of sequences in tokens of a linear layer: n + n^2 / attention_length, rounded, [n] int64.

    Args:
        attention_length: tokens of a sequence whose scores take as long as the linear layers, see
            `gkd.hf.model_dims.attention_length`.
    """
    n = n_tokens.astype(np.int64)
    return n + np.rint(n.astype(np.float64) ** 2 / attention_length).astype(np.int64)


def _deal(group_of: np.ndarray, n_tokens: np.ndarray, samples: np.ndarray, dp_size: int, longer_than: float) -> None:
    """Assign the sequences of more tokens than `longer_than`, longest first, to the group with the least of them."""
    dealt = np.zeros(dp_size, np.int64)
    for i in np.lexsort((samples, -n_tokens))[: np.count_nonzero(n_tokens > longer_than)]:
        group_of[i] = dealt.argmin()
        dealt[group_of[i]] += n_tokens[i]


# The heaviest group may exceed the mean by this share: below it, another move costs more than it gains.
TOLERANCE = 0.01


def even_groups(samples: Sequence[np.ndarray], lengths: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Move sequences until no group has more than 1 + TOLERANCE times the mean, or no move or exchange helps.

    A training step takes as long as its heaviest group. The loss is a token mean over the global batch, so it does not
    depend on which group computes which part of it.

    The result does not depend on the order of the sequences in a group. What two groups have above and below the mean
    moves in few, long sequences at once; single moves and exchanges follow. A group that has a sequence keeps at least
    one, and an empty group gets one if another group has two.

    Args:
        samples: by group, [n] int32, identifiers of its sequences: unique over all groups.
        lengths: by group, [n] integers, their work, same order.

    Returns:
        By group, the samples that it has afterwards, ascending.
    """
    groups = [_Group(s, n) for s, n in zip(samples, lengths, strict=True)]
    mean = sum(g.total for g in groups) / len(groups)
    while True:
        heavy, *_ = by_weight = sorted(groups, key=lambda g: -g.total)  # stable: ties in the order of the groups
        light = by_weight[-1]
        if len(light.keys) == 0:
            donor = next((g for g in by_weight if len(g.keys) > 1), None)
            if donor is None:
                break
            donor.give(light, donor.nearest((donor.total - light.total) / 2))
        elif heavy.total <= (1 + TOLERANCE) * mean:
            break
        elif heavy.give_longest(light, min(heavy.total - mean, mean - light.total)):
            continue
        elif not any(_relieve(heavy, other) for other in reversed(by_weight[1:])):
            break
    return [np.sort(g.samples) for g in groups]


class _Group:
    """One group's sequences, shortest first; ties ordered by sample."""

    def __init__(self, samples: np.ndarray, lengths: np.ndarray) -> None:
        self._set(np.sort(lengths.astype(np.int64) << 32 | samples))

    def _set(self, keys: np.ndarray) -> None:
        self.keys = keys
        self.lengths = keys >> 32
        self.total = int(self.lengths.sum())

    @property
    def samples(self) -> np.ndarray:
        return (self.keys & 0xFFFFFFFF).astype(np.int32)

    def nearest(self, length: float) -> int:
        """Return the index of the sequence whose length is nearest; of several, the first."""
        return int(self.all_nearest(np.array([length]))[0])

    def all_nearest(self, lengths: np.ndarray) -> np.ndarray:
        """Return `nearest` of each length."""
        above = np.searchsorted(self.lengths, lengths).clip(1, max(1, len(self.lengths) - 1))
        below = above - 1
        above = above.clip(max=len(self.lengths) - 1)
        is_below = lengths - self.lengths[below] <= self.lengths[above] - lengths
        return np.searchsorted(self.lengths, self.lengths[np.where(is_below, below, above)])

    def give(self, other: _Group, index: int | slice) -> None:
        """Move the sequences at `index` to the other group."""
        moved = np.atleast_1d(self.keys[index])
        self._set(np.delete(self.keys, index))
        other._set(np.sort(np.concatenate((other.keys, moved)), kind="stable"))  # fast: two sorted parts

    def give_longest(self, other: _Group, tokens: float) -> bool:
        """Move the longest sequences, as many as have at most these tokens together; return False if there are none."""
        n = int(np.searchsorted(self.lengths[:0:-1].cumsum(), tokens, "right"))  # the shortest one stays
        if n:
            self.give(other, slice(len(self.keys) - n, None))
        return n > 0


def _relieve(heavy: _Group, light: _Group) -> bool:
    """Make the move, or else the exchange, that leaves the two groups most alike; return False if none helps.

    Moving d tokens makes a gap of g tokens |g - 2 d|, which is smaller exactly if 0 < d < g.
    """
    gap = heavy.total - light.total
    single = heavy.nearest(gap / 2)
    moved = int(heavy.lengths[single])
    # An exchange costs two moves, so it must leave less than half of the gap that a single move leaves.
    best = abs(gap - 2 * moved) / 2 if 0 < moved < gap else float(gap)
    if len(light.lengths):
        offered = heavy.all_nearest(light.lengths + gap / 2)
        net = heavy.lengths[offered] - light.lengths
        left = np.where((net > 0) & (net < gap), np.abs(gap - 2 * net), np.inf)
        returned = int(left.argmin())
        if left[returned] < best:
            key = light.keys[returned]
            heavy.give(light, int(offered[returned]))
            light.give(heavy, int(np.searchsorted(light.keys, key)))
            return True
    if 0 < moved < gap:
        heavy.give(light, single)
        return True
    return False
