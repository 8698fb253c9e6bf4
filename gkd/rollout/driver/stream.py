"""One job of the dispatcher: what a batch or a stream of prompts admits, and the chunks that it gets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Protocol

import numpy as np

from gkd.rollout.messages import Job
from gkd.types import Prompt, RolloutChunk


@dataclass(slots=True)
class Waiting:
    """An unfinished prompt."""

    stream: JobStream
    prompt: Prompt
    index: int
    missing: int  # bit i: sample i has not been returned

    @property
    def key(self) -> tuple[int, int]:
        return self.stream.job.id, self.index

    @property
    def is_unanswered(self) -> bool:
        return self.missing == all_samples(self.stream.job)


def all_samples(job: Job) -> int:
    """Return `Waiting.missing` of a prompt of which no sample has been returned."""
    return (1 << job.sampling.n) - 1


def take_missing(held: dict[tuple[int, int], Waiting], job: Job, sample_index: np.ndarray) -> np.ndarray:
    """Record that an engine has returned these samples; return the places of the missing ones, ascending.

    The others an engine that died had returned before.

    Args:
        held: by job and prompt index, the prompts that the engine answers; complete ones are removed.
        sample_index: [n] distinct.
    """
    n = job.sampling.n
    order = np.argsort(sample_index)
    of_prompts, samples = np.divmod(sample_index[order], n)
    starts = np.flatnonzero(np.diff(of_prompts, prepend=-1))
    ends = [*starts[1:].tolist(), len(order)]
    bits = np.array(1, np.int64 if n < 63 else object) << samples
    returned_bits = np.bitwise_or.reduceat(bits, starts).tolist()
    kept = np.ones(len(order), bool)
    for index, returned, start, end in zip(
        of_prompts[starts].tolist(), returned_bits, starts.tolist(), ends, strict=True
    ):
        prompt = held.get(key := (job.id, index))
        missing = 0 if prompt is None else prompt.missing
        if returned & ~missing:
            kept[order[start:end]] = [bool(missing & bit) for bit in bits[start:end].tolist()]
        if prompt is not None:
            prompt.missing = missing & ~returned
            if not prompt.missing:
                del held[key]
    return np.flatnonzero(kept)


class Owner(Protocol):
    """The part of `gkd.rollout.driver.dispatcher.Dispatcher` that a job uses."""

    def admit(self, stream: JobStream, prompts: Sequence[Waiting]) -> None: ...
    def waiting(self, stream: JobStream) -> list[int]: ...
    def end(self, stream: JobStream) -> None: ...


class JobStream:
    """Implements `gkd.roles.RolloutStream`: the prompts of one job, and their chunks. Thread-safe.

    Args:
        first: its prompts go before the prompts of other jobs.
    """

    def __init__(self, owner: Owner, job: Job, *, first: bool) -> None:
        self.job, self.first, self.closed = job, first, False
        self._owner = owner
        self._results: SimpleQueue[RolloutChunk | Exception | None] = SimpleQueue()

    def admit(self, prompts: Sequence[Prompt], *, prompt_indices: Sequence[int]) -> None:
        """See `RolloutStream.admit`. Raises ClusterError: the stream is closed."""
        missing = all_samples(self.job)
        rows = [Waiting(self, prompt, i, missing) for prompt, i in zip(prompts, prompt_indices, strict=True)]
        self._owner.admit(self, rows)

    def finished(self, timeout_s: float | None = None) -> list[RolloutChunk]:
        """See `RolloutStream.finished`; returns an empty list if the stream is closed.

        Raises:
            EngineFailed: an engine failed for good.
            ClusterError: a stream failed.
            DataError: an engine refused a prompt.
        """
        chunks: list[RolloutChunk] = []
        try:
            if not self.closed:
                result = self._results.get(timeout=timeout_s)
                while True:
                    if isinstance(result, Exception):
                        self.put(result)  # the next call raises it
                        if not chunks:
                            raise result
                        break
                    if result is None:
                        break
                    chunks.append(result)
                    result = self._results.get_nowait()
        except Empty:
            pass  # all that have finished so far
        return chunks

    def waiting(self) -> list[int]:
        """See `RolloutStream.waiting`."""
        return self._owner.waiting(self)

    def put(self, result: RolloutChunk | Exception | None) -> None:
        self._results.put(result)

    def close(self) -> None:
        """See `RolloutStream.close`. Raises ClusterError: an engine failed to stop; not if a stream failed before."""
        self._owner.end(self)
