"""Pass the inputs of a batch to a rank, as arguments of a Ray call. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice, zip_longest
from typing import Any, Self

import numpy as np

from gkd.actor.megatron.layout import ParallelLayout
from gkd.data.scatter import GroupPart
from gkd.errors import DataError
from gkd.types import Rollout, TeacherScores


@dataclass(frozen=True, slots=True)
class ChunkInputs:
    """A data-parallel group's part of a batch: of each chunk the sequences, and the chunk's lists.

    On the driver, Ray handles stand in the place of the lists of rollouts, scores and reference logprobs.
    """

    indices: Sequence[bytes | None]  # the group's sequences in each chunk, see `gkd.data.scatter`
    rollouts: Sequence[list[Rollout]]
    scores: Sequence[list[TeacherScores]] = ()  # empty except on the last pipeline stage, which computes the loss
    # [R] float32 of each sequence, or None for one that is not trained on; a chunk's last ones may be left out. Empty
    # where `scores` are, and without a reference.
    reference: Sequence[list[np.ndarray | None]] = ()
    numbers: Sequence[bytes] = ()  # numbers of the group's sequences, as in `ScoredChunk`; empty: none needed

    @classmethod
    def of_parts(cls, group_parts: Sequence[GroupPart], layout: ParallelLayout) -> Self:
        """Return the inputs, with handles, of a rank whose data-parallel group has these parts."""
        chunks = [part.chunk for part in group_parts]
        scored = chunks if layout.is_last_stage else []
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
