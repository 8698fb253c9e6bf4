"""Chunks of a stream until all their sequences are trained on, and which prompts are complete.

A step has tens of thousands of sequences, so nothing here is a Python object per sequence.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

import numpy as np

from gkd.data.chunks import part_of
from gkd.handles import PendingScores


@dataclass(slots=True)
class _Chunk:
    pending: PendingScores
    positions: np.ndarray  # [n_sequences] of their prompts
    n_left: int  # sequences not trained on


class StreamChunks:
    """Not thread-safe.

    Args:
        n: samples per prompt.
    """

    def __init__(self, n: int) -> None:
        self._n = n
        self._chunks: list[_Chunk] = []
        self._incomplete: dict[int, tuple[int, int]] = {}  # position -> samples that are missing, oldest version

    def add(self, pending: PendingScores) -> Iterator[tuple[int, int]]:
        """Add a chunk; yield (position, oldest version) of each prompt that it completes.

        Raises:
            KeyError: a position has more than n samples.
        """
        positions = pending.rollouts.sample_index // self._n
        self._chunks.append(_Chunk(pending, positions, len(positions)))
        order = np.argsort(positions, kind="stable")
        starts = np.flatnonzero(np.diff(positions[order], prepend=-1))
        counts = np.diff(starts, append=len(order))
        oldest = np.minimum.reduceat(pending.rollouts.versions[order], starts)
        rows = zip(positions[order][starts].tolist(), counts.tolist(), oldest.tolist(), strict=True)
        for position, count, version in rows:
            n_missing, before = self._incomplete.pop(position, (self._n, version))
            if count > n_missing:
                raise KeyError(position)
            if count == n_missing:
                yield position, min(version, before)
            else:
                self._incomplete[position] = n_missing - count, min(version, before)

    def parts(self, positions: Collection[int]) -> list[PendingScores]:
        """Return all samples of these positions as parts of their chunks."""
        return [
            replace(chunk.pending, rollouts=part_of(chunk.pending.rollouts, places))
            for chunk, places in self._places(positions)
        ]

    def remove(self, positions: Collection[int]) -> None:
        """Forget the samples of these positions."""
        for chunk, places in self._places(positions):
            chunk.n_left -= len(places)
        self._chunks = [chunk for chunk in self._chunks if chunk.n_left]

    def _places(self, positions: Collection[int]) -> list[tuple[_Chunk, np.ndarray]]:
        """Return the chunks with samples of these positions, and where in the chunk they are, ascending."""
        if not self._chunks or not positions:
            return []
        of_all = np.concatenate([chunk.positions for chunk in self._chunks])
        chosen = np.isin(of_all, np.fromiter(positions, np.int64, len(positions)))
        ends = np.cumsum([len(chunk.positions) for chunk in self._chunks])
        found = [np.flatnonzero(own) for own in np.split(chosen, ends[:-1])]
        return [(chunk, places) for chunk, places in zip(self._chunks, found, strict=True) if len(places)]
