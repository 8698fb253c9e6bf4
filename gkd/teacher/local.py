"""The driver's side of a local teacher: the actor's ranks score, all of them together, when a batch is whole.

    submit      nothing yet: the ranks are a teacher in one call, between two training steps
    collect     the sequences dealt out so that each rank has about as many tokens -> one collective call
                -> each chunk's scores put together on the host of the group that trains on it

Training and scoring share the ranks, so there must be nothing that scores beside a training step: `trainer.scheduler`
is sync, or batches are replayed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gkd.cluster.calls import gather
from gkd.data.balance import even_groups
from gkd.handles import PendingScores, Recording, RolloutChunk, ScoredChunk
from gkd.teacher.scoring import RecordedScoring


class LocalScoring(RecordedScoring):
    """Over the actor's workers, in rank order, and endpoints that know no teacher.

    `collect` and `record` may call the actor, so shared GPUs must be in its turn (`gkd.pipeline.colocation`).
    """

    def __init__(self, workers: Sequence[Any], endpoints: Sequence[Any], timeout_s: float) -> None:
        super().__init__(endpoints, timeout_s)
        self._workers = list(workers)

    def submit(self, chunk: RolloutChunk) -> PendingScores:
        """Its handles are there when it has been collected."""
        return PendingScores(chunk, None, None)

    def collect(self, pending: Sequence[PendingScores]) -> list[ScoredChunk]:
        """Scores those that have no scores yet; blocks for a forward pass. Raises TeacherError."""
        return super().collect(self._all_scored(pending))

    def record(
        self, chunks: Sequence[PendingScores | ScoredChunk], folder: Path, label: str, *, scored: bool
    ) -> Recording:
        """With `scored`, those that have no scores yet are scored first."""
        if scored:
            made = iter(self._all_scored([chunk for chunk in chunks if isinstance(chunk, PendingScores)]))
            chunks = [next(made) if isinstance(chunk, PendingScores) else chunk for chunk in chunks]
        return super().record(chunks, folder, label, scored=scored)

    def _all_scored(self, pending: Sequence[PendingScores]) -> list[PendingScores]:
        made = iter(self._scored([p.rollouts for p in pending if p.summary is None]))
        return [next(made) if p.summary is None else p for p in pending]

    def _scored(self, chunks: Sequence[RolloutChunk]) -> list[PendingScores]:
        if not chunks:
            return []
        done, parts = dealt_out(self._workers, "score", chunks)
        gather(done, "teacher scoring", self._timeout_s)
        scored = []
        for i, chunk in enumerate(chunks):
            assemble = self._endpoints[chunk.dp_rank].assemble.options(num_returns=2)
            scores, summary = assemble.remote([take for take, _ in parts[i]], *(table for _, table in parts[i]))
            scored.append(PendingScores(chunk, scores, summary))
        return scored


def dealt_out(
    workers: Sequence[Any], method: str, chunks: Sequence[RolloutChunk], **options: Any
) -> tuple[dict[str, Any], dict[int, list[tuple[bytes, Any]]]]:
    """One collective call over the actor's ranks; returns at once.

    Args:
        method: of the workers; takes places in chunks, and the chunks; returns None, and then a list for each chunk.
        options: keywords of the call.

    Returns:
        Handles of the ranks' ends by name; and of each chunk, by its number, the places and the handle of each part.
    """
    done: dict[str, Any] = {}
    parts: dict[int, list[tuple[bytes, Any]]] = defaultdict(list)
    # Every rank is called, also one without a sequence: a layer is gathered from all of them.
    for rank, share in enumerate(deal(chunks, len(workers))):
        takes, handles = [take for _, take in share], [chunks[i].ref for i, _ in share]
        call = getattr(workers[rank], method).options(num_returns=1 + len(share))
        answer = call.remote(takes, *handles, **options)
        done[f"actor rank {rank}"], *tables = answer if share else [answer]
        for (i, take), table in zip(share, tables, strict=True):
            parts[i].append((take, table))
    return done, parts


def deal(chunks: Sequence[RolloutChunk], n_ranks: int) -> list[list[tuple[int, bytes]]]:
    """By rank (number of a chunk, places in it of the sequences that it scores, int32), with about as many tokens each.

    Neighbours stay together where they can, so that few chunks are split.
    """
    if not chunks:
        return [[] for _ in range(n_ranks)]
    lengths = np.concatenate([chunk.n_tokens for chunk in chunks]).astype(np.int64)
    owner = np.repeat(np.arange(len(chunks)), [chunk.n_sequences for chunk in chunks])
    place = np.concatenate([np.arange(chunk.n_sequences) for chunk in chunks])
    middle = lengths.cumsum() - lengths / 2
    first = np.minimum(middle * n_ranks // lengths.sum(), n_ranks - 1)
    groups = [np.flatnonzero(first == rank).astype(np.int32) for rank in range(n_ranks)]
    shares = []
    for mine in even_groups(groups, [lengths[group].astype(np.int32) for group in groups]):
        wanted = [(int(i), place[mine[owner[mine] == i]].astype("<i4").tobytes()) for i in np.unique(owner[mine])]
        shares.append(wanted)
    return shares
