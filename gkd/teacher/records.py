"""Scoring endpoints without a teacher: summarize, gather, record and restore the scores of chunks.

Base of all scoring endpoints: one process per data-parallel group, on the host of the group's last pipeline stage,
without a GPU and without torch.
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
from gkd.types import SIGNAL_FIELDS, Rollout, TeacherScores

_SUMMARY = struct.Struct("<dq")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ScoreSummary:
    """Summary of a chunk's scores for the driver; encoded in 16 bytes, and 8 + 8 per sequence with times."""

    mass: float | None  # sum over positions of the teacher's probability on its top-k; None: no top-k was requested
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
    """Hold the scores of one data-parallel group for the ranks that train on them.

    Args:
        config: the run's settings.
    """

    def __init__(self, config: Config) -> None:
        self._config = config

    def is_up(self) -> bool:
        """Return once the process runs."""
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
        """Return placeholders for unused logprobs: [R] float32 per sequence."""
        return [np.zeros(len(rollout.response_ids), np.float32) for rollout in rollouts]

    def record(self, file: str, n_chunks: int, *parts: Any) -> dict[str, FileDigest]:
        """Write chunks of rollouts, and optionally their scores, to one file and flush it to disk.

        Args:
            file: path on a file system that all hosts share.
            n_chunks: the first `n_chunks` of `parts` are rollouts; the others, if any, are their scores.

        Returns:
            File name -> digest.

        Raises:
            CheckpointError: the file cannot be written.
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
        """Yield the sequences of this group from files written by `record`, in chunks.

        Four objects per chunk: rollouts and scores (None: not recorded), which the driver never fetches, and then the
        encoded sizes and summary (empty: not scored), which it does.

        Args:
            dp_rank: this group; it owns the prompts with index modulo dp_size = dp_rank.
            chunk_size: sequences per chunk; 0: one chunk per prompt.

        Raises:
            CheckpointError: a file is unreadable or not a recording.
        """
        n = self._config.rollout.n
        mine: dict[int, list[tuple[Rollout, TeacherScores | None]]] = defaultdict(list)  # by prompt index
        for file in files:
            path = Path(file)
            rollouts, scores = read_sequences(path)
            for i, rollout in enumerate(rollouts):
                if rollout.sample_index // n % dp_size == dp_rank:
                    mine[rollout.sample_index // n].append((rollout, None if scores is None else scores[i]))
        groups = list(mine.values())
        if chunk_size:
            # All sequences of a chunk have the same `on_policy`, and all or none have scores.
            kinds: dict[tuple[bool, bool], list[tuple[Rollout, TeacherScores | None]]] = defaultdict(list)
            for rollout, score in (pair for group in groups for pair in group):
                kinds[rollout.on_policy, score is not None].append((rollout, score))
            groups = [k[i : i + chunk_size] for k in kinds.values() for i in range(0, len(k), chunk_size)]
        for group in groups:
            chunk = [rollout for rollout, _ in group]
            scores = [score for _, score in group if score is not None] or None
            # Dataset responses have no version: they are never stale.
            version = min((rollout.policy_version for rollout in chunk), default=0) if chunk[0].on_policy else 0
            yield chunk
            yield scores
            yield encode_sizes(chunk_sizes(dp_rank, chunk, version))
            yield summary_of(scores).encode() if scores else b""


def summary_of(scores: Sequence[TeacherScores], times: ScoreTimes | None = None) -> ScoreSummary:
    """Summarize the scores of a chunk."""
    n_bytes, masses = 0, []
    for score in scores:
        arrays = [getattr(score, name) for signal, name in SIGNAL_FIELDS.items() if signal != "topk"]
        if score.topk is not None:
            arrays += [score.topk.topk_ids, score.topk.topk_logprobs, score.topk.tail_mass, score.topk.counts]
            masses.append(float(np.exp(score.topk.topk_logprobs, dtype=np.float64).sum()))
        n_bytes += sum(array.nbytes for array in arrays if array is not None)
    return ScoreSummary(sum(masses) if masses else None, n_bytes, times)
