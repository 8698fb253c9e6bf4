"""The Ray surface of one scoring endpoint: asks the teacher for one data-parallel group, on that group's host.

It has no GPU and loads no torch: tokens come from the object store, go to the teacher over ZMQ, and the scores go
into the object store of this host, where the group's last pipeline stage maps them without a copy. What is asked of
each sequence follows from teacher.signal and the loss (`gkd.loss.spec.teacher_signals`).
"""

from __future__ import annotations

import functools
import math
import os
import struct
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np

from gkd.config import Config
from gkd.disk import naming
from gkd.errors import TeacherError, TeacherUnavailable
from gkd.loss.spec import loss_spec, teacher_signals
from gkd.manifest import digest_file
from gkd.recorded import read_sequences, write_sequences
from gkd.roles import FileDigest, ScoreTimes
from gkd.rollout.chunks import chunk_sizes, encode_sizes
from gkd.teacher.client import ZmqTeacher
from gkd.types import Rollout, TeacherScores
from teacher_server.protocol import Signal, Wire

_FIELDS: dict[Signal, str] = {"topk": "topk", "sampled": "sampled_logprobs", "hidden": "hidden"}
_SUMMARY = struct.Struct("<dq")


@dataclass(frozen=True, slots=True)
class ScoreSummary:
    """What the driver learns of a chunk's scores: 16 raw bytes, and for the times 8 and 8 a sequence."""

    mass: float | None  # sum over positions of the teacher's probability on its top-k; None: no top-k was asked for
    n_bytes: int  # of all arrays
    times: ScoreTimes | None = field(default=None, compare=False)  # None: read from a checkpoint

    def encode(self) -> bytes:
        times = () if self.times is None else (self.times.asked_s, *self.times.answered_s)
        head = _SUMMARY.pack(float("nan") if self.mass is None else self.mass, self.n_bytes)
        return head + np.array(times, "<f8").tobytes()

    @classmethod
    def decode(cls, data: bytes) -> ScoreSummary:
        mass, n_bytes = _SUMMARY.unpack_from(data)
        asked_s, *answered_s = np.frombuffer(data, "<f8", offset=_SUMMARY.size).tolist() or (None,)
        times = None if asked_s is None else ScoreTimes(asked_s, tuple(answered_s))
        return cls(None if math.isnan(mass) else mass, n_bytes, times)


class ScoringEndpoint:
    """One data-parallel group's way to the teacher: one client, which scores several chunks at a time, one a thread.

    Args:
        config: the run's settings.
        n_vocab: ids that student and teacher have in common; the teacher's other rows are cut before it normalises.
        fingerprint: of the teacher that preflight met; no other one's scores are used.
        n_in_flight: requests that it keeps at the server, over all threads.

    Raises:
        ConfigError: the loss is not one that `gkd.config_check` lets pass.
    """

    def __init__(self, config: Config, n_vocab: int, fingerprint: str, n_in_flight: int) -> None:
        self._config, self._n_vocab, self._fingerprint, self._n_in_flight = config, n_vocab, fingerprint, n_in_flight
        teacher = config.teacher
        signal = cast(Signal, teacher.signal)
        self._signals = teacher_signals(loss_spec(config.distill, teacher.temperature), signal)
        self._lock = threading.Lock()
        self._teacher: ZmqTeacher | None = None
        self._gone: TeacherUnavailable | None = None

    def is_up(self) -> bool:
        """Answers once the process runs. Raises ConfigError if teacher.keys cannot be read on this host."""
        self._client()
        return True

    def _client(self) -> ZmqTeacher:
        teacher = self._config.teacher
        with self._lock:
            if self._teacher is None:
                self._teacher = ZmqTeacher(
                    teacher.server_ip,
                    teacher.server_port,
                    k=teacher.topk if "topk" in self._signals else 1,
                    temperature=teacher.temperature,
                    n_vocab=self._n_vocab,
                    n_in_flight=self._n_in_flight,
                    request_timeout_s=teacher.request_timeout_s,
                    outage_budget_s=teacher.outage_budget_s,
                    wire=cast(Wire, teacher.wire),
                    expected_fingerprint=self._fingerprint,
                    name=teacher.name,
                    keys=teacher.keys,
                )
            return self._teacher

    def score(self, rollouts: Sequence[Rollout]) -> tuple[list[TeacherScores], bytes]:
        """Blocks until every sequence is scored; the client checks the scores. After an error nothing of it is left
        running.

        Two objects come back; the driver fetches only the second.

        Returns:
            Scores in the order of `rollouts`, with the tables that the loss needs; `ScoreSummary.encode` of them.

        Raises:
            TeacherError, TeacherUnavailable: see `gkd.teacher.base.Teacher.score`.
        """
        if self._gone is not None:  # the run ends: what waited for a thread must not wait for the teacher once more
            raise self._gone
        teacher = self._client()
        asked_s = time.time()
        answered_s = [asked_s] * len(rollouts)
        try:
            if self._signals == ("logits",):
                # One stream a thread: each sequence's rows are large, and what came too early would wait in memory.
                scores = []
                for index, rollout in enumerate(rollouts):
                    scores.append(TeacherScores(logits=self._logits(teacher, rollout)))
                    answered_s[index] = time.time()
            else:
                scores = self._all_at_once(teacher, rollouts, answered_s)
        except TeacherUnavailable as error:
            self._gone = error
            raise
        return scores, _summary(scores, ScoreTimes(asked_s, tuple(answered_s))).encode()

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
            yield _summary(scores).encode() if scores else b""

    def lm_head(self) -> np.ndarray:
        """[n_vocab, D] float32: hidden states @ lm_head.T are the teacher's logits, not yet divided by the temperature.

        For the actor, once; it is not kept here.

        Raises:
            TeacherError, TeacherUnavailable: as of `score`; also if it has fewer rows or a NaN or an infinity.
        """
        head = self._client().lm_head()
        if len(head) < self._n_vocab:
            raise TeacherError(f"the teacher's LM head has {len(head)} rows, expected at least {self._n_vocab}")
        head = head[: self._n_vocab]
        if not np.isfinite(head.sum(dtype=np.float64)):  # finite float32 numbers cannot overflow it
            raise TeacherError("the teacher's LM head holds a NaN or an infinity")
        return head

    def _all_at_once(
        self, teacher: ZmqTeacher, rollouts: Sequence[Rollout], answered_s: list[float]
    ) -> list[TeacherScores]:
        """Every request of every sequence handed to the client, which keeps `n_in_flight` of them at the server.

        Writes into `answered_s` when each sequence's last answer came.
        """
        asked: list[tuple[int, str, Future[Any]]] = []  # (sequence, field of TeacherScores, its table)
        try:
            for index, rollout in enumerate(rollouts):
                for signal in self._signals:
                    future = self._submit(teacher, rollout, signal)
                    future.add_done_callback(functools.partial(_note_time, answered_s, index))
                    asked.append((index, _FIELDS[signal], future))
            for future in wait([future for *_, future in asked], return_when=FIRST_EXCEPTION).done:
                future.result()  # raises what ended the wait early
            tables: list[dict[str, Any]] = [{} for _ in rollouts]
            for index, field, future in asked:
                tables[index][field] = future.result()
        finally:
            for *_, future in asked:
                future.cancel()
        return [TeacherScores(**fields) for fields in tables]

    def _submit(self, teacher: ZmqTeacher, rollout: Rollout, signal: Signal) -> Future[Any]:
        if signal == "topk":
            return teacher.submit(rollout, mass=self._config.teacher.mass)
        return teacher.submit_sampled(rollout) if signal == "sampled" else teacher.submit_hidden(rollout)

    def _logits(self, teacher: ZmqTeacher, rollout: Rollout) -> np.ndarray:
        """[R, n_vocab]; float16 where the wire has no more than that, so nothing is lost."""
        dtype = np.float16 if self._config.teacher.wire == "fp16" else np.float32
        logits = np.empty((len(rollout.response_ids), self._n_vocab), dtype)
        for start, rows in teacher.logits(rollout):
            logits[start : start + len(rows)] = rows
        return logits


def _note_time(answered_s: list[float], index: int, _: Future[Any]) -> None:
    answered_s[index] = time.time()


def _summary(scores: Sequence[TeacherScores], times: ScoreTimes | None = None) -> ScoreSummary:
    n_bytes, masses = 0, []
    for score in scores:
        arrays = [score.sampled_logprobs, score.logits, score.hidden]
        if score.topk is not None:
            arrays += [score.topk.topk_ids, score.topk.topk_logprobs, score.topk.tail_mass, score.topk.counts]
            masses.append(float(np.exp(score.topk.topk_logprobs, dtype=np.float64).sum()))
        n_bytes += sum(array.nbytes for array in arrays if array is not None)
    return ScoreSummary(sum(masses) if masses else None, n_bytes, times)
