"""Scatter the sequences of chunks over data-parallel groups or ranks, select them there, and gather the results.

    driver    scatter_to_groups | scatter_to_ranks    which sequences of which chunk
    rank      select | map_selected                   those sequences, out of the chunks
    host      gather_results                          the results of several ranks, in the order of the chunk

A selection is always called `sequence_indices`: the positions of the sequences in the list that the chunk's handle
names, as little-endian int32 bytes; None selects the whole list. A batch may have several parts of one list.
- Positions, because they index a chunk's rollouts, scores and reference logprobs alike. A `sample_index` does not: two
  chunks may have the same ones (of two evaluations), and sorting results by it does not restore a chunk's order.
- Bytes, because a pickled array has 100 bytes and more of its own, and a chunk may have a single sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from gkd.data.balance import even_groups
from gkd.errors import DataError
from gkd.handles import RolloutChunk, ScoredChunk
from gkd.types import Rollout, TeacherScores

_INDEX, _NUMBER = "<i4", "<f4"
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class GroupPart:
    """The sequences of one chunk that one data-parallel group trains on."""

    chunk: ScoredChunk
    sequence_indices: bytes | None
    advantages: bytes | None = None  # float32, of these sequences; None means the loss has no rewards


@dataclass(frozen=True, slots=True)
class RankPart:
    """The sequences of one chunk that one rank computes something for."""

    chunk_index: int  # index in the list of chunks that was scattered
    sequence_indices: bytes | None


def encode_indices(indices: np.ndarray, n_sequences: int) -> bytes | None:
    """Return the `sequence_indices` of a list of `n_sequences`.

    Args:
        indices: [n] integers, distinct and ascending.
    """
    return None if len(indices) == n_sequences else indices.astype(_INDEX).tobytes()


def encode_part(chunk: RolloutChunk, positions: np.ndarray | None = None) -> bytes | None:
    """Return the `sequence_indices` of some sequences of a chunk.

    Args:
        positions: [n] in the chunk's own order, distinct and ascending; None means all.
    """
    if positions is None:
        positions = np.arange(chunk.n_sequences)
    if chunk.sequence_indices is None:
        return encode_indices(positions, chunk.n_sequences)
    return chunk.sequence_indices[positions].astype(_INDEX).tobytes()


def decode_indices(sequence_indices: bytes | None, n_sequences: int) -> list[int]:
    """Return the positions in a chunk of `n_sequences`. Raises DataError: a position is outside of the chunk."""
    if sequence_indices is None:
        return list(range(n_sequences))
    indices: list[int] = np.frombuffer(sequence_indices, _INDEX).tolist()
    if missing := [i for i in indices if not 0 <= i < n_sequences]:
        raise DataError(f"sequence_indices {missing} are not in their chunk, which has {n_sequences} sequences")
    return indices


def scatter_to_groups(batch: Sequence[ScoredChunk], dp_size: int, *, balance: bool) -> list[list[GroupPart]]:
    """Return, by data-parallel group, its parts of the chunks that it has any sequence of, in the order of `batch`.

    Args:
        balance: even out the groups' tokens; else each group trains on the chunks that were generated for it.
    """
    chunks = [c.rollouts for c in batch]
    n_sequences = [chunk.n_sequences for chunk in chunks]
    samples = _joined([chunk.sample_index for chunk in chunks])
    group_of = np.repeat(np.array([chunk.dp_rank for chunk in chunks], np.int32), n_sequences)
    if balance:
        lengths = _joined([chunk.n_tokens for chunk in chunks])
        groups = [np.flatnonzero(group_of == group) for group in range(dp_size)]
        order = np.argsort(samples)
        for group, own in enumerate(even_groups([samples[g] for g in groups], [lengths[g] for g in groups])):
            group_of[order[np.searchsorted(samples, own, sorter=order)]] = group
    parts: list[list[GroupPart]] = [[] for _ in range(dp_size)]
    for chunk, owners in zip(batch, np.split(group_of, np.cumsum(n_sequences)[:-1]), strict=True):
        for group in sorted(set(owners.tolist())):  # faster than np.unique for a chunk
            at = np.flatnonzero(owners == group)
            advantages = None if chunk.advantages is None else chunk.advantages[at].astype(_NUMBER).tobytes()
            parts[group].append(GroupPart(chunk, encode_part(chunk.rollouts, at), advantages))
    return parts


def scatter_to_ranks(chunks: Sequence[RolloutChunk], n_ranks: int) -> list[list[RankPart]]:
    """Return, by rank, the parts of the chunks that it computes, with about the same number of tokens for each rank.

    The result does not depend on the composition of the chunks, which depends on timing. Sequences with neighboring
    sample indices stay together where possible, so that few chunks are split.
    """
    if not chunks:
        return [[] for _ in range(n_ranks)]
    n_tokens = np.concatenate([chunk.n_tokens for chunk in chunks]).astype(np.int64)
    chunk_of = np.repeat(np.arange(len(chunks)), [chunk.n_sequences for chunk in chunks])
    index_of = np.concatenate([np.arange(chunk.n_sequences) for chunk in chunks])
    order = np.argsort(_joined([chunk.sample_index for chunk in chunks]), kind="stable")
    n_tokens, chunk_of, index_of = n_tokens[order], chunk_of[order], index_of[order]
    middle = n_tokens.cumsum() - n_tokens / 2
    first_guess = np.minimum(middle * n_ranks // n_tokens.sum(), n_ranks - 1)
    groups = [np.flatnonzero(first_guess == rank).astype(np.int32) for rank in range(n_ranks)]
    ranks: list[list[RankPart]] = []
    for own in even_groups(groups, [n_tokens[group].astype(np.int32) for group in groups]):
        parts = []
        for i in np.unique(chunk_of[own]).tolist():
            parts.append(RankPart(i, encode_part(chunks[i], np.sort(index_of[own[chunk_of[own] == i]]))))
        ranks.append(parts)
    return ranks


def select(
    sequence_indices: Sequence[bytes | None],
    chunks: Sequence[list[Rollout]],
    scores: Sequence[list[TeacherScores]] | None,
) -> tuple[list[Rollout], list[TeacherScores] | None]:
    """Return the selected sequences of all chunks and their scores.

    Args:
        sequence_indices: by chunk.
        scores: by chunk; None on pipeline stages that compute no loss.

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


def with_advantages(rollouts: Sequence[Rollout], advantages: Sequence[bytes]) -> list[Rollout]:
    """Return the selected sequences with their advantages.

    Args:
        rollouts: of `select`.
        advantages: by part, see `GroupPart`.

    Raises:
        DataError: there is not one for each sequence.
    """
    values = np.frombuffer(b"".join(advantages), _NUMBER).tolist()
    if len(values) != len(rollouts):
        raise DataError(f"a batch of {len(rollouts)} sequences has {len(values)} advantages")
    return [replace(rollout, advantage=value) for rollout, value in zip(rollouts, values, strict=True)]


def map_selected(
    sequence_indices: Sequence[bytes | None],
    chunks: Sequence[list[Rollout]],
    compute: Callable[[list[Rollout]], Sequence[T]],
) -> list[list[T]]:
    """Return, by chunk, the result of `compute` for each selected sequence.

    `compute` is called once, with the sequences of all chunks; also with none, since it may be a collective.

    Raises:
        DataError: a chunk lacks a selected sequence.
    """
    selected = [
        [chunk[i] for i in decode_indices(selection, len(chunk))]
        for selection, chunk in zip(sequence_indices, chunks, strict=True)
    ]
    results = iter(compute([rollout for part in selected for rollout in part]))
    return [[next(results) for _ in part] for part in selected]


def gather_results(sequence_indices: Sequence[bytes | None], parts: Sequence[list[T]]) -> list[T | None]:
    """Return the results of one chunk at the places of its sequences in their list; None where no part has one.

    Args:
        sequence_indices: of each part.
        parts: the results of `map_selected` for this chunk, by rank.

    Raises:
        DataError: a sequence has two results, or a part has not one for each of its sequences.
    """
    placed: dict[int, T] = {}
    for selection, part in zip(sequence_indices, parts, strict=True):
        at = range(len(part)) if selection is None else np.frombuffer(selection, _INDEX).tolist()
        if len(at) != len(part) or not placed.keys().isdisjoint(at):
            raise DataError(f"a part of a chunk has results of {len(part)} sequences for {list(at)}; others have some")
        placed.update(zip(at, part, strict=True))
    return [placed.get(i) for i in range(max(placed, default=-1) + 1)]


def _joined(tables: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.zeros(0, np.int32), *tables])
