"""Scoring endpoints without a teacher: summarize, gather, record and restore the scores of chunks; judge responses.

Base of all scoring endpoints: one process per data-parallel group, on the host of the group's last pipeline stage,
without a GPU and without torch.
"""

from __future__ import annotations

import math
import os
import struct
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from gkd.config.schema import Config
from gkd.data.chunks import ColumnList, chunk_sizes, encode_sizes, whole_groups
from gkd.data.scatter import gather_results, select
from gkd.run.disk import naming
from gkd.run.manifest import digest_file
from gkd.run.rollout_file import read_sequences, write_sequences
from gkd.scoring.reward.judging import Judging
from gkd.types import SIGNAL_FIELDS, FileDigest, PendingScores, Rollout, ScoredChunk, ScoreTimes, TeacherScores

_SUBMITTED = struct.Struct("<d")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ScoreSummary:
    """Summary of a chunk's scores for the driver; encoded in 8 bytes and 16 per sequence."""

    masses: np.ndarray  # [n] float32, mean over positions of the teacher's mass on its top-k; NaN: none was requested
    n_bytes: np.ndarray  # [n] int64, of all arrays
    times: ScoreTimes | None = None  # None: from a checkpoint, or a local teacher

    def encode(self) -> bytes:
        submitted_s = math.nan if self.times is None else self.times.submitted_s
        times = np.zeros(len(self.masses)) if self.times is None else self.times.completed_s - submitted_s
        tables = self.n_bytes.astype("<i8"), self.masses.astype("<f4"), times.astype("<f4")
        return b"".join([_SUBMITTED.pack(submitted_s), *(table.tobytes() for table in tables)])

    @classmethod
    def decode(cls, data: bytes) -> ScoreSummary:
        (submitted_s,) = _SUBMITTED.unpack_from(data)
        n = (len(data) - _SUBMITTED.size) // 16
        n_bytes = np.frombuffer(data, "<i8", n, _SUBMITTED.size)
        masses, after_s = np.frombuffer(data, "<f4", 2 * n, _SUBMITTED.size + 8 * n).reshape(2, n)
        times = None
        if not math.isnan(submitted_s):
            times = ScoreTimes(submitted_s, submitted_s + after_s.astype(np.float64))
        return cls(masses, n_bytes, times)

    def scored(self, pending: PendingScores) -> ScoredChunk:
        """Return the chunk, or the part of one, that was submitted, as scored."""
        masses = self.masses
        n_bytes = self.n_bytes
        times = self.times
        indices = pending.rollouts.sequence_indices
        if indices is not None:
            masses = masses[indices]
            n_bytes = n_bytes[indices]
            times = None if times is None else ScoreTimes(times.submitted_s, times.completed_s[indices])
        mass = float(masses.astype(np.float64) @ pending.rollouts.n_response)
        return ScoredChunk(pending.rollouts, pending.ref, None if math.isnan(mass) else mass, int(n_bytes.sum()), times)


class GroupEndpoint:
    """Hold the scores of one data-parallel group for the ranks that train on them."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._judging: Judging | None = None

    def init_judging(self, *arguments: Any) -> None:
        """Start the processes that judge responses: `Judging` with these arguments behind the settings."""
        self._judging = Judging(self._config, *arguments)

    def judge(self, rollouts: Sequence[Rollout], prompts: str) -> bytes:
        """See `gkd.scoring.reward.judging.Judging.judge`."""
        assert self._judging is not None
        return self._judging.judge(rollouts, prompts)

    def prompted(self, rollouts: Sequence[Rollout]) -> tuple[list[Rollout], bytes]:
        """See `gkd.scoring.reward.judging.Judging.prompted`. These are two Ray objects."""
        assert self._judging is not None
        return self._judging.prompted(rollouts)

    def is_up(self) -> bool:
        """Return once the process runs."""
        return True

    def gather_scores(
        self, sequence_indices: Sequence[bytes | None], *score_lists: list[TeacherScores]
    ) -> tuple[list[TeacherScores], bytes]:
        """Put a chunk's scores, computed in parts by several ranks, into the object store of this host.

        Arguments as for `gkd.data.scatter.gather_results`, result as of `ScoringEndpoint.score`.
        """
        scores = [score for score in gather_results(sequence_indices, score_lists) if score is not None]
        return scores, summary_of(scores).encode()

    def gather_results(self, sequence_indices: Sequence[bytes | None], *results: list[T]) -> list[T | None]:
        """Put other results of several ranks into the object store of this host, at the places of their sequences."""
        return gather_results(sequence_indices, results)

    def zeros(self, rollouts: Sequence[Rollout]) -> list[np.ndarray]:
        """Return placeholders for unused logprobs: [M] float32 per sequence."""
        return [np.zeros(rollout.n_own, np.float32) for rollout in rollouts]

    def record(self, file: str, selections: Sequence[bytes | None], *chunks_and_scores: Any) -> dict[str, FileDigest]:
        """Write chunks of rollouts, and maybe their scores, to one file, and flush it to disk; return name -> digest.

        Args:
            file: path on a file system that all hosts share.
            selections: `sequence_indices` to write of each chunk, see `gkd.data.scatter`.
            chunks_and_scores: the rollouts of each chunk, and then, optionally, their scores.

        Raises:
            CheckpointError: the file cannot be written.
        """
        n_chunks = len(selections)
        rollouts, scores = select(selections, chunks_and_scores[:n_chunks], chunks_and_scores[n_chunks:] or None)
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

        Raises:
            CheckpointError: a file is unreadable or not a recording.
        """
        n = self._config.rollout.n
        chunk_size = whole_groups(self._config, chunk_size)
        # All sequences of a chunk have the same `on_policy`, and all or none have scores.
        kinds: dict[tuple[bool, bool], list[tuple[Rollout, TeacherScores | None]]] = defaultdict(list)
        for file in files:
            rollouts, scores = read_sequences(Path(file))
            optional: Sequence[TeacherScores | None] = scores or [None] * len(rollouts)
            for rollout, score in zip(rollouts, optional, strict=True):
                if rollout.sample_index // n % dp_size == dp_rank:
                    kinds[rollout.on_policy, score is not None].append((rollout, score))
        for (on_policy, _), kind in kinds.items():
            kind.sort(key=lambda sequence: sequence[0].sample_index)
            for start in range(0, len(kind), chunk_size):
                group = kind[start : start + chunk_size]
                chunk = [rollout for rollout, _ in group]
                scores = [score for _, score in group if score is not None] or None
                yield ColumnList(chunk)
                yield ColumnList(scores) if scores else None
                # Dataset responses have no version: they are never stale.
                yield encode_sizes(chunk_sizes(dp_rank, chunk, None if on_policy else 0))
                yield summary_of(scores).encode() if scores else b""


def summary_of(scores: Sequence[TeacherScores], times: ScoreTimes | None = None) -> ScoreSummary:
    """Summarize the scores of a chunk."""
    n_bytes = np.zeros(len(scores), np.int64)
    masses = np.full(len(scores), math.nan, np.float32)
    for i, score in enumerate(scores):
        arrays = [getattr(score, name) for signal, name in SIGNAL_FIELDS.items() if signal != "topk"]
        if score.topk is not None:
            arrays += [score.topk.ids, score.topk.logprobs, score.topk.tail, score.topk.counts]
            n_rows = len(score.topk.logprobs)  # 0: the teacher's tokenizer does not have the text
            masses[i] = np.exp(score.topk.logprobs, dtype=np.float64).sum() / max(1, n_rows)
        n_bytes[i] = sum(array.nbytes for array in arrays if array is not None)
    return ScoreSummary(masses, n_bytes, times)
