"""Protocols that the training loop is written against: rollout, scoring, actor, reference, weight sync.

`gkd.trainer` and `gkd.pipeline` import only these. `gkd.start.launcher` passes implementations that call Ray actors;
tests pass plain objects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np

from gkd.errors import RankTimeout
from gkd.types import (
    FileDigest,
    GreedyReport,
    PendingScores,
    ProcessSpans,
    Prompt,
    Recording,
    ResponseLimits,
    RolloutChunk,
    RolloutUsage,
    Sample,
    ScoredChunk,
    SyncReport,
    TeacherHealth,
    TrainStats,
)

T_co = TypeVar("T_co", covariant=True)


class Pending(Protocol[T_co]):
    """Calls that are being executed."""

    def wait(self) -> T_co:
        """Wait for the calls, and return their result. May be repeated. Raises the error of a rank that failed."""


@dataclass(frozen=True, slots=True)
class Computation:
    """A batch that a worker of the teacher server computed, as a scoring endpoint learns of it."""

    worker: str
    received_s: float  # first reply of the batch; since the epoch, on the clock of the endpoint's host
    queue_s: float  # time that this request waited at the server
    compute_s: float
    n_sequences: int  # sequences of this endpoint


class MovableStates(Protocol):
    """States that a role can release; `gkd.memory.offload_manager.state_offload_manager` takes such a role."""

    def offload_states(self, include: Sequence[str] | None = None, *, blocking: bool = True) -> Pending[object]:
        """Offload states to host memory. Idempotent.

        Args:
            include: of the actor "params", "grads", "optimizer"; of the engines "params", "kv_cache". None: all.
            blocking: wait for all processes. False: the caller waits with the returned handle.
        """

    def reload_states(self, include: Sequence[str] | None = None, *, blocking: bool = True) -> Pending[object]:
        """Undo `offload_states`. Idempotent."""

    def allocated_bytes(self) -> int:
        """Return the bytes that these states, and on GPUs all else of the actor, have on the device.

        Maximum over processes.
        """


class RolloutRole(MovableStates, Protocol):
    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        prompt_indices: Sequence[int],
        n: int,
        temperature: float,
        seed: int,
        limits: ResponseLimits | None = None,
    ) -> Iterator[RolloutChunk]:
        """Yield chunks in order of completion. A prompt's index determines the data-parallel group of its rollouts.

        Args:
            limits: None: those of the settings.
            prompt_indices: index of each prompt in the whole batch.
            n: samples per prompt.
        """

    def open_stream(self, *, n: int, temperature: float, seed: int) -> RolloutStream:
        """Start streaming: the engines generate for prompts as they are admitted, also across weight updates.

        Only one stream can be open. `generate`, `greedy` and weight syncs run concurrently with it.
        """

    def dataset(
        self, prompts: Sequence[Prompt], *, prompt_indices: Sequence[int], policy_version: int
    ) -> list[RolloutChunk]:
        """Return the dataset's responses to these prompts as finished chunks, one sequence per prompt.

        Groups are assigned as in `generate`. Their version is `policy_version`, the current one: a dataset response is
        never stale.
        """

    def greedy(self, prompts: Sequence[Prompt], *, n_samples: int) -> GreedyReport:
        """Generate greedily and compare with the reference answers; keep the first `n_samples` responses."""

    def texts(self, chunks: Sequence[RolloutChunk], *, n: int, n_samples: int) -> list[Sample]:
        """Return one response to each of the first `n_samples` prompts of finished chunks as text, not judged.

        Args:
            n: samples per prompt in these chunks.
        """

    def offload_states(
        self, include: Sequence[str] | None = None, level: int = 1, *, blocking: bool = True
    ) -> Pending[object]:
        """Release the engines' GPU memory. Idempotent. Calls that need a released state reload it.

        Args:
            level: sleep level as in vLLM. 1 = offload the weights to host memory | 2 = discard them until the next
                weight sync.

        Raises:
            ConfigError: neither `engines_sleep` of `gkd.api.open_pools` nor trainer.colocate is on.
            ClusterError: level 2 with weight_sync.lora = adapters, which sends the base weights once.
        """

    def usage(self) -> RolloutUsage:
        """Return and reset the engines' counters; waits for a batch in progress."""


class ScoringRole(Protocol):
    def submit(self, chunk: RolloutChunk) -> PendingScores:
        """Start scoring; returns at once."""

    def collect(self, pending: Sequence[PendingScores]) -> list[ScoredChunk]:
        """Wait for these scores and return them in the same order. Raises TeacherUnavailable, TeacherError."""

    def record(
        self, chunks: Sequence[PendingScores | ScoredChunk], folder: Path, label: str, *, scored: bool
    ) -> Recording:
        """Start writing these chunks to files in the existing `folder`; returns at once.

        Args:
            label: prefix of the file names; identifies the files in `restore`.
            scored: also wait for the scores and write them. False: write only the rollouts.
        """

    def record_finished(
        self, recording: Recording, *, wait: bool, timeout_s: float | None = None
    ) -> dict[str, FileDigest] | None:
        """Return file name -> digest of the files that `record` wrote; all of them are on disk.

        Args:
            wait: block until everything is written. Otherwise None = still writing.
            timeout_s: limit of the wait; None: trainer.stage_timeout_s.

        Raises:
            CheckpointError: a file could not be written.
            TeacherUnavailable, TeacherError: the scores to be written failed.
        """

    def restore(self, folder: Path, label: str) -> list[PendingScores]:
        """Read the chunks recorded under this label, bit-exact; submit those that were recorded without scores.

        The number of data-parallel groups may have changed: each sequence goes to the group of its prompt index.
        Returns an empty list if nothing was recorded under the label.

        Raises:
            CheckpointError: a file is unreadable or not a recording.
        """

    def take_computations(self, *, wait: bool) -> Mapping[str, Sequence[Computation]]:
        """Return by endpoint ("scoring 0") what the teacher computed; without `wait` what has arrived so far."""


class JudgeRole(ScoringRole, Protocol):
    def judge(self, samples: Sequence[Sample]) -> Sequence[float]:
        """Return eval.metric of each greedy response; blocks. What is collected has that of sampled ones."""


class ActorRole(MovableStates, Protocol):
    def accumulate(self, part: Sequence[ScoredChunk]) -> None:
        """Add the gradients of a part of the next step's batch; `train_step` gets the rest.

        The step is that of the whole batch, but for rounding. Raises ConfigError: see `Derived.early_parts`.
        """

    def train_step(self, batch: Sequence[ScoredChunk], meta: Mapping[str, Any] | None = None) -> TrainStats:
        """Make one optimizer step on the whole batch, or on what of it is left after `accumulate`.

        Args:
            meta: {"is_offload_states": bool}: whether to offload the states afterwards. None: as configured.
        """

    def evaluate(
        self, batch: Sequence[ScoredChunk], *, keep_tokens: int = 0, meta: Mapping[str, Any] | None = None
    ) -> TrainStats:
        """Compute the training loss without an update.

        Args:
            keep_tokens: return the loss terms of each token of this many sequences.
            meta: as for `train_step`.
        """

    def compute_logprobs(
        self,
        batch: Sequence[PendingScores | ScoredChunk],
        *,
        blocking: bool = True,
        meta: Mapping[str, Any] | None = None,
    ) -> Pending[list[list[np.ndarray]]]:
        """Compute the actor's logprobs of a batch, which may still wait for the teacher's scores. No gradients.

        For each chunk, in its order, the logprobs of each sequence's response tokens: [R] float32, nats, at the
        temperature of the loss, teacher.temperature.

        Args:
            blocking: wait for all ranks. Otherwise wait on the returned handle.
            meta: {"disable_adapter": bool}: whether to compute without LoRA adapters. {"is_offload_states": bool}: as
                for `train_step`.
        """

    def save(self, folder: Path, *, blocking: bool = False) -> None:
        """Start a save. Returns when every rank has copied its state to host memory, so training can continue.

        The files appear in `folder` in the background. `folder` must not exist; its parent must.

        Args:
            blocking: return when the files are written. The ranks then make no copy.
        """

    def save_finished(self, *, wait: bool, timeout_s: float | None = None) -> dict[str, FileDigest] | None:
        """Return POSIX path relative to the save's folder -> digest of each file; all of them are on disk.

        Works also while a rank is busy with another call or hangs in it.

        Args:
            wait: block until everything is written. Otherwise None = still writing.
            timeout_s: limit of the wait; None: trainer.stage_timeout_s.

        Raises:
            CheckpointError: a rank could not write.
            ClusterError: a rank died or timed out.
        """

    def load(self, folder: Path) -> None:
        """Load an earlier save, possibly from another parallel layout. Raises CheckpointError."""

    def export_hf(self, folder: Path) -> None:
        """Write the student as a Hugging Face model folder."""

    def memory_numbers(self) -> dict[str, float]:
        """Return memory and offload metrics since the last call: name -> maximum over all ranks.

        See `gkd.memory.usage` and `gkd.memory.offload_manager` for the names.
        """

    def take_spans(self) -> list[ProcessSpans]:
        """Return the spans that came with the calls of `memory_numbers` since the last call; asks no rank."""


class ReferenceRole(Protocol):
    def compute_logprobs(
        self, batch: Sequence[PendingScores | ScoredChunk], *, blocking: bool = True
    ) -> ReferenceHandle:
        """Compute the reference model's logprobs of a batch, which may still wait for the teacher's scores.

        A call on the actor's ranks: make it only from the thread that calls the actor.

        Args:
            blocking: wait for all ranks. Otherwise wait on the returned handle.
        """


class WeightSyncRole(Protocol):
    def push(self, policy_version: int) -> SyncReport:
        """Send the actor's weights to every rollout engine; blocks until all of them hold this version."""


class NoReference:
    """The reference of a run without reference KL: returns each batch unchanged."""

    def compute_logprobs(
        self, batch: Sequence[PendingScores | ScoredChunk], *, blocking: bool = True
    ) -> ReferenceHandle:
        return self

    def wait(self, batch: Sequence[ScoredChunk]) -> list[ScoredChunk]:
        return list(batch)


@dataclass(frozen=True, slots=True)
class Roles:
    """The groups of processes that the loop calls.

    Attributes:
        remark: warning about a setting that slows every step down, for the steps' log lines; may be empty.
        teacher_health: returns what is known of the teacher server, within seconds, in any thread; None: nothing.
        diagnose_hang: returns the error with a report of which ranks hang where.
        judge: scores and judges held-out responses; None: the engines compare greedy responses.
        evaluation: scores held-out responses if there is no judge; None: `scoring`.
    """

    actor: ActorRole
    rollout: RolloutRole
    scoring: ScoringRole
    weight_sync: WeightSyncRole
    reference: ReferenceRole = NoReference()
    remark: str = ""
    teacher_health: Callable[[], TeacherHealth | None] = lambda: None
    diagnose_hang: Callable[[RankTimeout], RankTimeout] = lambda error: error
    judge: JudgeRole | None = None
    evaluation: ScoringRole | None = None


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

    def finished(self, timeout_s: float | None = None) -> list[RolloutChunk]:
        """Return the sequences that finished since the last call, in chunks; one may have several prompts' samples.

        Waits for the first one until the stream is closed, or at most `timeout_s`, then returns an empty list. Raises
        ClusterError: an engine died.
        """

    def waiting(self) -> list[int]:
        """Return the indices of prompts of which nothing has been generated, as far as known within a second."""

    def close(self) -> None:
        """Stop and drop unfinished sequences. Idempotent."""


class ReferenceHandle(Protocol):
    def wait(self, batch: Sequence[ScoredChunk]) -> list[ScoredChunk]:
        """Return the batch with `ScoredChunk.reference` set. Raises the error of a failed rank.

        Args:
            batch: the chunks of the call in the same order, scored meanwhile.
        """
