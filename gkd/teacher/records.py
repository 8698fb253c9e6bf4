"""The teacher's scores on their way: what the driver learns of them; chunks of them written to files and read again.

What every scoring endpoint does, whoever the teacher is: one process for each data-parallel group, on the host of that
group's last pipeline stage, without a GPU and without torch.
"""

from __future__ import annotations

import math
import os
import struct
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from gkd.config.schema import Config
from gkd.data.chunks import chunk_sizes, encode_sizes
from gkd.data.rollout_file import read_sequences, write_sequences
from gkd.data.scatter import gather_results
from gkd.handles import FileDigest, ScoreTimes
from gkd.run.disk import naming
from gkd.run.manifest import digest_file
from gkd.types import Rollout, TeacherScores

_SUMMARY = struct.Struct("<dq")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ScoreSummary:
    """What the driver learns of a chunk's scores: 16 raw bytes, and for the times 8 and 8 a sequence."""

    mass: float | None  # sum over positions of the teacher's probability on its top-k; None: no top-k was asked for
    n_bytes: int  # of all arrays
    times: ScoreTimes | None = field(default=None, compare=False)  # None: from a checkpoint, or a local teacher

    def encode(self) -> bytes:
        times = () if self.times is None else (self.times.submitted_s, *self.times.completed_s)
        head = _SUMMARY.pack(float("nan") if self.mass is None else self.mass, self.n_bytes)
        return head + np.array(times, "<f8").tobytes()

    @classmethod
    def decode(cls, data: bytes) -> ScoreSummary:
        mass, n_bytes = _SUMMARY.unpack_from(data)
        submitted_s, *completed_s = np.frombuffer(data, "<f8", offset=_SUMMARY.size).tolist() or (None,)
        times = None if submitted_s is None else ScoreTimes(submitted_s, tuple(completed_s))
        return cls(None if math.isnan(mass) else mass, n_bytes, times)


class RecordingEndpoint:
    """One data-parallel group's scores, between whoever made them and the ranks that train on them.

    Args:
        config: the run's settings.
    """

    def __init__(self, config: Config) -> None:
        self._config = config

    def is_up(self) -> bool:
        """Answers once the process runs."""
        return True

    def gather_scores(
        self, sequence_indices: Sequence[bytes | None], *parts: list[TeacherScores]
    ) -> tuple[list[TeacherScores], bytes]:
        """Put a chunk's scores, computed in parts by several ranks, into the object store of this host.

        Args:
            sequence_indices: of each part, see `gkd.data.scatter`.

        Returns:
            As `ScoringEndpoint.score`.
        """
        scores = gather_results(sequence_indices, parts)
        return scores, summary_of(scores).encode()

    def gather_results(self, sequence_indices: Sequence[bytes | None], *parts: list[T]) -> list[T]:
        """Put other results of several ranks into the object store of this host, in the chunk's order."""
        return gather_results(sequence_indices, parts)

    def zeros(self, rollouts: Sequence[Rollout]) -> list[np.ndarray]:
        """[R] float32 for each sequence: in the place of numbers that nobody reads."""
        return [np.zeros(len(rollout.response_ids), np.float32) for rollout in rollouts]

    def record(self, file: str, n_chunks: int, *parts: Any) -> dict[str, FileDigest]:
        """Write chunks of rollouts, and their scores, into one file, and flush it.

        Args:
            file: its path, on a file system that all hosts share.
            n_chunks: `parts` are so many chunks of rollouts and, if they are to be recorded, their scores.

        Returns:
            Its name and digest.

        Raises:
            CheckpointError: it cannot be written; names it.
        """
        rollouts = [rollout for chunk in parts[:n_chunks] for rollout in chunk]
        scores = [score for chunk in parts[n_chunks:] for score in chunk] if len(parts) > n_chunks else None
        path = Path(file)
        with naming(path):
            with path.open("wb") as opened:
                write_sequences(opened, rollouts, scores)
                opened.flush()
                os.fsync(opened.fileno())
            return {path.name: digest_file(path)}

    def restore(self, files: Sequence[str], dp_rank: int, dp_size: int, chunk_size: int) -> Iterator[Any]:
        """This group's part of some files that `record` wrote, in chunks.

        Four objects a chunk: the rollouts and the scores (None: they were not recorded), which the driver never
        fetches, and then `encode_sizes` and `ScoreSummary.encode` (nothing if not scored), which it does.

        Args:
            dp_rank: of how many groups this one is; it takes the sequences of every dp_size-th place.
            chunk_size: sequences of a chunk; 0: a chunk for each prompt.

        Raises:
            CheckpointError: a file cannot be read, or is something else.
        """
        n = self._config.rollout.n
        mine: dict[int, list[tuple[Rollout, TeacherScores | None]]] = defaultdict(list)  # by place
        for file in files:
            path = Path(file)
            rollouts, scores = read_sequences(path)
            for i, rollout in enumerate(rollouts):
                if rollout.sample_index // n % dp_size == dp_rank:
                    mine[rollout.sample_index // n].append((rollout, None if scores is None else scores[i]))
        groups = list(mine.values())
        if chunk_size:
            # A chunk's sequences are of one kind, see `RolloutChunk.on_policy`, and scored or not.
            kinds: dict[tuple[bool, bool], list[tuple[Rollout, TeacherScores | None]]] = defaultdict(list)
            for rollout, score in (pair for group in groups for pair in group):
                kinds[rollout.on_policy, score is not None].append((rollout, score))
            groups = [k[i : i + chunk_size] for k in kinds.values() for i in range(0, len(k), chunk_size)]
        for group in groups:
            chunk = [rollout for rollout, _ in group]
            scores = [score for _, score in group if score is not None] or None
            # No policy wrote a dataset response, so it has no version; it is never stale.
            version = min((rollout.policy_version for rollout in chunk), default=0) if chunk[0].on_policy else 0
            yield chunk
            yield scores
            yield encode_sizes(chunk_sizes(dp_rank, chunk, version))
            yield summary_of(scores).encode() if scores else b""


def summary_of(scores: Sequence[TeacherScores], times: ScoreTimes | None = None) -> ScoreSummary:
    """Of a chunk's scores."""
    n_bytes, masses = 0, []
    for score in scores:
        arrays = [score.sampled_logprobs, score.logits, score.hidden]
        if score.topk is not None:
            arrays += [score.topk.topk_ids, score.topk.topk_logprobs, score.topk.tail_mass, score.topk.counts]
            masses.append(float(np.exp(score.topk.topk_logprobs, dtype=np.float64).sum()))
        n_bytes += sum(array.nbytes for array in arrays if array is not None)
    return ScoreSummary(sum(masses) if masses else None, n_bytes, times)
