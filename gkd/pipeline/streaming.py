"""Scheduler `stream`: prompts go to the engines one by one, and a step takes prompts whose samples have all finished.

    prefetch    admit as many prompts as the staleness bound allows; prompts that have not been started are not due yet
    early_part  wait until the batch is determined: enough prompts have finished, and others are due. Return the
                finished ones, and the dataset's responses of the step; call it again while others are generated
    next_batch  return the rest, when it has finished
    push        in the middle of responses; the engines continue with the new weights

A thread receives chunks of finished sequences and submits them to the teacher at once. A chunk may have samples of
several prompts, and a step may take a part of it. Which prompts form a batch depends on
timing; `trainer.record_batches` keeps the batches, and `trainer.replay` trains on them again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from gkd.config.schema import Config
from gkd.data.chunks import part_of
from gkd.data.sampler import PromptSampler, on_policy_indices
from gkd.errors import ClusterError, RankTimeout
from gkd.pipeline.batches import Background, BatchSource
from gkd.pipeline.staleness import StreamScheduler
from gkd.roles import RolloutRole, RolloutStream, ScoringRole
from gkd.run.checkpoints import TrainerState
from gkd.types import InFlight, PendingScores, Prompt, RolloutChunk

LABEL = "stream"
T = TypeVar("T")


class StreamedBatches(BatchSource):
    """Batches from one `RolloutStream`. A prompt is identified by its position in the sampler's order."""

    def __init__(
        self, config: Config, rollout: RolloutRole, scoring: ScoringRole, sampler: PromptSampler, total_steps: int
    ) -> None:
        self._config = config
        self._rollout = rollout
        self._scoring = scoring
        self._sampler = sampler
        self._size = config.trainer.global_batch_size
        self._n = config.rollout.n
        self.max_staleness = config.trainer.staleness_bound
        self._on_policy = lru_cache(4 * (self.max_staleness + 2))(self._on_policy_positions)
        self._scheduler = StreamScheduler(
            self._on_policy, self.max_staleness, total_steps, early_parts=config.derived.early_parts
        )
        self._chunks = StreamChunks(self._n)
        self._received_s = 0.0  # when the last chunk came, or the wait for it began
        self._awaited: Callable[[], Any] | None = None  # None until the finished prompts have what the loop waits for
        self._batch: list[int] = []  # positions that are being trained on
        self._late: list[int] = []  # positions of `_batch` that no part has
        self._changed = threading.Condition()  # guards all of the above
        self._stream: RolloutStream | None = None
        self._asking = Background("unstarted prompts")
        self._asked: Future[None] | None = None
        self._error: Exception | None = None
        self._from_dataset: list[PendingScores] = []  # dataset responses of the current step, before a part takes them
        self._unfinished: list[int] = []  # positions that were in flight at the checkpoint
        self._closed = False

    @property
    def is_streaming(self) -> bool:
        return self._stream is not None

    def restore(self, folder: Path, state: TrainerState) -> None:
        self._scheduler.next_batch = state.sampler_position // self._size
        self._unfinished = list(state.unfinished)
        restored = self._scoring.restore(folder, LABEL)
        oldest: dict[int, int] = {}
        for chunk in (pending.rollouts for pending in restored):
            for position, version in zip(
                (chunk.sample_index // self._n).tolist(), chunk.versions.tolist(), strict=True
            ):
                oldest[position] = min(version, oldest.get(position, version))
        for position, version in oldest.items():
            self._scheduler.admit([position], version)
        for pending in restored:
            self._finish(pending)

    def prefetch(self, step: int) -> None:
        if self._stream is None:
            settings = self._config.rollout
            self._stream = self._rollout.open_stream(
                n=settings.n, temperature=settings.temperature, seed=self._config.data.seed
            )
            threading.Thread(target=self._receive, args=(self._stream,), name="stream", daemon=True).start()
        if self._asked is not None:
            self._asked.result()  # raises the error of the last question
        self._asked = self._asking.start(partial(self._ask_engines, self._stream, step))
        with self._changed:
            again = self._unfinished
            self._unfinished = []
            self._scheduler.admit(again, step)
            positions = [*again, *self._scheduler.admit_new(step)]
        if positions:
            self._stream.admit(self._prompts(positions), prompt_indices=positions)

    def early_part(self, step: int) -> list[PendingScores]:
        if not self._batch:
            self._from_dataset = [self._scoring.submit(chunk) for chunk in self._dataset(step)]
            with self._changed:
                choice = self._scheduler.choose(step)
            if self._asked is not None and (choice is None or choice[1]):
                self._asked.result()  # some prompts that it would wait for may not be due
            finished, late = self._wait_for(lambda: self._scheduler.choose(step))
            self._batch = [*finished, *late]
        else:
            finished, late = self._wait_for(lambda: self._scheduler.split(self._late))
        self._late = late or finished
        return self._take(finished) if late else []

    def next_batch(self, step: int) -> list[PendingScores]:
        return self._take(self._late)

    def commit(self) -> None:
        with self._changed:
            self._scheduler.remove(self._batch)
            self._chunks.remove(self._batch)
            self._batch = []
            self._late = []

    def in_flight(self, step: int) -> InFlight:
        del step
        with self._changed:
            chunks = self._chunks.parts(self._scheduler.finished)
            unfinished = (*self._scheduler.unfinished, *self._unfinished)
            position = self._scheduler.next_batch * self._size
            return InFlight(position, unfinished, {LABEL: chunks} if chunks else {})

    def close(self, *, wait: bool) -> None:
        self._closed = True
        self._asking.close()
        if wait and self._stream is not None:
            self._stream.close()

    def _on_policy_positions(self, batch: int) -> list[int]:
        """Return the positions of a batch of the sampler's order that the student responds to."""
        indices = on_policy_indices(batch, self._size, self._config.distill.on_policy_share, self._config.data.seed)
        return [batch * self._size + i for i in indices]

    def _dataset(self, step: int) -> list[RolloutChunk]:
        """Return the dataset's responses of this step, so that each step has its share of both kinds."""
        batch = range(step * self._size, (step + 1) * self._size)
        positions = sorted(set(batch) - set(self._on_policy(step)))
        if not positions:
            return []
        return self._rollout.dataset(self._prompts(positions), prompt_indices=positions, policy_version=step)

    def _prompts(self, positions: Sequence[int]) -> list[Prompt]:
        """Return the prompts at these positions; most follow each other."""
        prompts: list[Prompt] = []
        runs = np.split(np.array(positions), np.flatnonzero(np.diff(positions) != 1) + 1)
        for run in runs:
            prompts += self._sampler.take(int(run[0]), len(run))
        return prompts

    def _take(self, positions: Sequence[int]) -> list[PendingScores]:
        """Return the sequences of these positions, and the dataset's responses that no part has."""
        from_dataset = self._from_dataset
        self._from_dataset = []
        with self._changed:
            return [*from_dataset, *self._chunks.parts(positions)]

    def _ask_engines(self, stream: RolloutStream, step: int) -> None:
        """Record which prompts have not been started; the engines have this step's weights, so they are not due."""
        waiting = stream.waiting()
        with self._changed:
            self._scheduler.not_started(waiting, step)

    def _wait_for(self, result_of: Callable[[], T | None]) -> T:
        """Wait until the finished prompts give this a value, and return it.

        Raises:
            ClusterError: an engine died.
            RankTimeout: no prompt has finished for trainer.stage_timeout_s.
        """
        timeout_s = self._config.trainer.stage_timeout_s
        with self._changed:
            self._received_s = time.monotonic()
            self._awaited = result_of
            while (value := result_of()) is None:
                if self._error is not None:
                    raise self._error
                left_s = self._received_s + timeout_s - time.monotonic()
                if left_s <= 0:
                    waiting = self._scheduler.unfinished
                    raise RankTimeout(
                        f"rollout: none of the {len(waiting)} prompts in the stream finished within {timeout_s:.0f} s "
                        f"(trainer.stage_timeout_s); the first positions are {waiting[:5]}"
                    )
                self._changed.wait(left_s)
            self._awaited = None
            return value

    def _receive(self, stream: RolloutStream) -> None:
        """Submit finished prompts to the teacher. Runs in its own thread."""
        try:
            while chunks := stream.finished():
                for chunk in chunks:
                    self._finish(self._scoring.submit(chunk))
        except Exception as error:  # `next_batch` raises it
            if not self._closed:
                with self._changed:
                    self._error = error
                    self._changed.notify_all()

    def _finish(self, pending: PendingScores) -> None:
        with self._changed:
            try:
                for position, oldest in self._chunks.add(pending):
                    self._scheduler.finish(position, oldest)
            except KeyError as error:
                text = f"rollout: an engine returned the prompt at position {error}, which is not in flight"
                raise ClusterError(text) from error
            self._received_s = time.monotonic()
            if self._awaited is not None and self._awaited() is not None:  # the loop is not woken for each chunk
                self._awaited = None
                self._changed.notify_all()


# Chunks of a stream until all their sequences are trained on, and which prompts are complete.
#
# A step has tens of thousands of sequences, so nothing here is a Python object per sequence.


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
        places_of = [np.flatnonzero(in_chunk) for in_chunk in np.split(chosen, ends[:-1])]
        return [(chunk, places) for chunk, places in zip(self._chunks, places_of, strict=True) if len(places)]
