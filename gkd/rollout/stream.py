"""One job of the dispatcher: what a batch or a stream of prompts admits, and the chunks that it gets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Protocol

from gkd.handles import RolloutChunk
from gkd.rollout.sampling import Job
from gkd.types import Prompt


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


class Owner(Protocol):
    """The part of `gkd.rollout.dispatcher.Dispatcher` that a job uses."""

    def admit(self, stream: JobStream, prompts: Sequence[Waiting]) -> None: ...
    def end(self, stream: JobStream) -> None: ...


class JobStream:
    """Implements `gkd.pending.RolloutStream`: the prompts of one job, and their chunks. Thread-safe.

    Args:
        first: its prompts go before those of other jobs.
    """

    def __init__(self, owner: Owner, job: Job, *, first: bool) -> None:
        self.job, self.first, self.closed = job, first, False
        self._owner = owner
        self._results: SimpleQueue[RolloutChunk | Exception | None] = SimpleQueue()

    def admit(self, prompts: Sequence[Prompt], *, prompt_indices: Sequence[int]) -> None:
        """See `RolloutStream.admit`. Raises ClusterError: the stream is closed. DataError: see `encode_prompts`."""
        missing = (1 << self.job.sampling.n) - 1
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
                        self.put(result)  # for the next call
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

    def put(self, result: RolloutChunk | Exception | None) -> None:
        self._results.put(result)

    def close(self) -> None:
        """See `RolloutStream.close`. Raises ClusterError: an engine failed to stop; not if a stream failed before."""
        self._owner.end(self)
