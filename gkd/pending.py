"""Protocols of calls that are in progress: what the roles return before the work is done."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from gkd.handles import RolloutChunk, ScoredChunk
from gkd.types import Prompt


class Pending(Protocol):
    def wait(self) -> object:
        """Wait for the calls. Raises the error of a rank that failed."""
        ...


class RolloutStream(Protocol):
    """Rollouts without batches: prompts are admitted at any time, and each sample is returned when it has finished.

    A sequence that is in progress when new weights arrive continues with the new weights; its KV cache is recomputed.
    Its `version_spans` record which version generated which tokens.
    """

    def admit(self, prompts: Sequence[Prompt], *, prompt_indices: Sequence[int]) -> None:
        """Queue the prompts for the engine that is free first; returns at once.

        Args:
            prompt_indices: one number per prompt, unique in the stream. Modulo the number of data-parallel groups it
                selects the group that scores the prompt; with `seed` it determines the seeds of the samples.
        """
        ...

    def finished(self, timeout_s: float | None = None) -> list[RolloutChunk]:
        """Return the sequences that finished since the last call, in chunks; one may have several prompts' samples.

        Waits for the first one until the stream is closed, or at most `timeout_s`, then returns an empty list. Raises
        ClusterError: an engine died.
        """
        ...

    def waiting(self) -> list[int]:
        """Return the indices of prompts of which nothing has been generated, as far as known within a second."""
        ...

    def close(self) -> None:
        """Stop and drop unfinished sequences. Idempotent."""
        ...


class LogprobsHandle(Protocol):
    def wait(self) -> list[list[np.ndarray]]:
        """Return for each chunk, in its order, the logprobs of each sequence's response tokens: [R] float32, nats.

        At the temperature of the loss, teacher.temperature. Raises the error of a failed rank.
        """
        ...


class ReferenceHandle(Protocol):
    def wait(self, batch: Sequence[ScoredChunk]) -> list[ScoredChunk]:
        """Return the batch with `ScoredChunk.reference` set. Raises the error of a failed rank.

        Args:
            batch: the chunks of the call in the same order, scored meanwhile.
        """
        ...

    def tuner_numbers(self) -> dict[str, float]:
        """Return the duration of the pass, for tuner.jsonl, after `wait`."""
        ...
