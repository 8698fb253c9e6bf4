"""What the loop needs from the others: Protocols that `gkd.trainer` is written against.

The driver passes handles around and reads sizes; tokens and scores stay in the object stores of
the hosts that made them. A handle's `ref` is opaque here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from gkd.types import Prompt


@dataclass(frozen=True, slots=True)
class RolloutChunk:
    """Handle of some finished rollouts of one data-parallel group."""

    dp_rank: int  # the group whose endpoint scores it; `gkd.data.balance` may have others train on some of it
    ref: Any  # of list[Rollout], in an object store
    n_sequences: int
    n_prompt_tokens: int
    n_response_tokens: int
    n_truncated: int  # responses that ran into max_response_length
    policy_version: int  # oldest version that wrote a part of it; the current one if no version did
    on_policy: bool = True  # False: the dataset's responses
    sample_index: np.ndarray = field(kw_only=True)  # [n_sequences] int32, see `Rollout`; in the order of the rollouts
    n_tokens: np.ndarray = field(kw_only=True)  # [n_sequences] int32, prompt and response


@dataclass(frozen=True, slots=True)
class PendingScores:
    """A rollout chunk that the teacher was asked about; the answer may still be on its way."""

    rollouts: RolloutChunk
    ref: Any  # see ScoredChunk; the handle is there before its content
    summary: Any  # handle of a `ScoreSummary`'s bytes


@dataclass(frozen=True, slots=True)
class ScoreTimes:
    """Times of a scored chunk: submission, and completion of each sequence. Seconds since the epoch, host clock."""

    submitted_s: float
    completed_s: tuple[float, ...]  # [n_sequences]


@dataclass(frozen=True, slots=True)
class ScoredChunk:
    """A rollout chunk and the handle of the teacher's scores for it."""

    rollouts: RolloutChunk
    ref: Any  # of list[TeacherScores], in the same order; only the last pipeline stage fetches it
    teacher_mass: float | None  # mean over positions of the teacher's mass on its top-k; None: it gave no such list
    n_teacher_bytes: int
    times: ScoreTimes | None = None  # None: scored before the run resumed, or by a local teacher
    # Of the reference's logprobs, list of [R] float32 in the same order; None: nobody asked for them.
    reference: Any = None


@dataclass(frozen=True, slots=True)
class InFlight:
    """What was begun and is not trained on yet: a checkpoint keeps it, so that a resumed run does."""

    position: int  # of the sampler's order, see `TrainerState.sampler_position`
    unfinished: tuple[int, ...] = ()  # positions whose answers are not finished; they begin again
    chunks: Mapping[str, Sequence[PendingScores]] = field(default_factory=dict)  # finished ones, by label


@dataclass(frozen=True, slots=True)
class TokenRecord:
    """The numbers of each response token of one sequence, for people to look at."""

    prompt_id: int
    sample_index: int
    response_ids: list[int]
    values: dict[str, list[float]]  # by the names of `gkd.loss.token_loss.TokenLosses`; nats or probabilities


@dataclass(frozen=True, slots=True)
class TrainStats:
    """What one global batch did; the same on every rank."""

    loss: float  # token mean over the global batch, nats
    n_loss_tokens: int
    grad_norm: float = 0.0  # global, before clipping; 0 in evaluation
    lr: float = 0.0  # of the update just made; 0 in evaluation
    extra: dict[str, float] = field(default_factory=dict)  # metric name -> value
    tokens: list[TokenRecord] = field(default_factory=list)  # of an evaluation that was asked for them


@dataclass(frozen=True, slots=True)
class Sample:
    """One held-out prompt and the engine's greedy answer, kept for people to read and for checks of the export."""

    prompt_id: int
    prompt_ids: list[int]
    response_ids: list[int]
    text: str
    answer: str
    correct: bool


@dataclass(frozen=True, slots=True)
class GreedyReport:
    """Greedy answers to held-out prompts."""

    accuracy: float  # share that is exactly right
    samples: list[Sample]  # the first few, in prompt order


@dataclass(frozen=True, slots=True)
class SyncReport:
    """What one weight sync did."""

    n_bytes: int
    verified_tensors: int  # 0 = not verified this time


@dataclass(frozen=True, slots=True)
class FileDigest:
    """What a writer says of a file that it wrote to disk: enough to find any later damage."""

    n_bytes: int
    xxh3_128: str  # 32 hex digits


@dataclass(frozen=True, slots=True)
class Recording:
    """Files that are being written: whose -> the handle of their digests."""

    refs: dict[str, Any]


@dataclass(frozen=True, slots=True)
class EngineUsage:
    """Counters of one engine since the previous `usage` call."""

    busy_s: float  # in forward passes
    gap_s: float  # between passes while sequences were unfinished: finished rollouts were handed over
    products: np.ndarray  # [4, 4] float64: sum over passes of x x^T with x = (1, b, p, seconds)
    response_lengths: np.ndarray  # [finished sequences] int32, tokens
    memory: Mapping[str, float] = field(default_factory=dict)  # metric name -> peak value


@dataclass(frozen=True, slots=True)
class RolloutUsage:
    """Counters of the rollout pool since the previous `usage` call."""

    engines: Sequence[EngineUsage]
    generate_s: float  # time in `generate`, from its first call to an engine to its last chunk
    memory: Mapping[str, float] = field(default_factory=dict)  # metric name -> maximum over the engines


class RolloutStream(Protocol):
    """Answers without batches: prompts go in at any time, each comes out when all its samples are finished.

    A sequence that is being written when new weights arrive goes on with those, its cache computed anew by them; its
    `version_spans` say who wrote which part.
    """

    def admit(self, prompts: Sequence[Prompt], *, prompt_indices: Sequence[int]) -> None:
        """Give prompts to the engines, to the least busy one each; returns at once.

        Args:
            prompt_indices: one number per prompt, unique in the stream. Modulo the number of data-parallel groups it
                selects the group that scores the prompt; with `seed` it determines the seeds of the samples.
        """
        ...

    def finished(self, timeout_s: float) -> list[RolloutChunk]:
        """What has finished since the last call, one chunk a prompt; waits for the first one for so long, and then
        returns nothing. Raises ClusterError: an engine died.
        """
        ...

    def close(self) -> None:
        """Stop; what is not finished is dropped. Calling it twice is harmless."""
        ...


class RolloutRole(Protocol):
    def generate(
        self, prompts: Sequence[Prompt], *, prompt_indices: Sequence[int], n: int, temperature: float, seed: int
    ) -> Iterator[RolloutChunk]:
        """Chunks as they finish. All rollouts of a prompt go to one data-parallel group, fixed by its index.

        Args:
            prompt_indices: index of each prompt in the whole batch.
        """
        ...

    def open_stream(self, *, n: int, temperature: float, seed: int) -> RolloutStream:
        """Have the engines answer prompts as they are given to them, also while they take new weights.

        One at a time; until it is closed, `generate` and `greedy` work beside it, and so does a weight sync.
        """
        ...

    def dataset(
        self, prompts: Sequence[Prompt], *, prompt_indices: Sequence[int], policy_version: int
    ) -> list[RolloutChunk]:
        """The dataset's responses to these prompts as finished chunks, one sequence a prompt, groups as above.

        Their version is `policy_version`, the current one: a dataset response is never stale.
        """
        ...

    def greedy(self, prompts: Sequence[Prompt], *, n_samples: int) -> GreedyReport:
        """Answer greedily, compare with the reference answers, keep the first `n_samples` answers."""
        ...

    def offload_states(self, include: Sequence[str] | None = None, level: int = 1) -> object:
        """Have the engines free their GPUs; harmless when they have. A call that needs what they hold reloads it.

        Args:
            level: 1 = host memory keeps the weights | 2 = the next weight sync brings them.
        """
        ...

    def reload_states(self, include: Sequence[str] | None = None) -> object:
        """The reverse."""
        ...

    def usage(self) -> RolloutUsage:
        """What the engines did since the last call; waits for a batch that is being answered."""
        ...


class ScoringRole(Protocol):
    def submit(self, chunk: RolloutChunk) -> PendingScores:
        """Start scoring; returns at once."""
        ...

    def collect(self, pending: Sequence[PendingScores]) -> list[ScoredChunk]:
        """Wait for these, and return them in their order. Raises TeacherUnavailable, TeacherError."""
        ...

    def record(
        self, chunks: Sequence[PendingScores | ScoredChunk], folder: Path, label: str, *, scored: bool
    ) -> Recording:
        """Start to write these chunks into files of `folder`, which is there; returns at once.

        Args:
            label: what the files' names begin with; `restore` asks for it.
            scored: wait for the scores and write them, too. False: the rollouts alone.
        """
        ...

    def recorded(
        self, recording: Recording, *, wait: bool, timeout_s: float | None = None
    ) -> dict[str, FileDigest] | None:
        """What `record` wrote: file name -> digest; all of it has reached the disk.

        Args:
            wait: block until all is written. Otherwise None = not yet.
            timeout_s: for how long at most; None: trainer.stage_timeout_s.

        Raises:
            CheckpointError: a file could not be written.
            TeacherUnavailable, TeacherError: the scores that were waited for failed.
        """
        ...

    def restore(self, folder: Path, label: str, *, per_prompt: bool) -> list[PendingScores]:
        """What was recorded with this label, to the bit; what had no scores then is submitted.

        The groups may be others now: each sequence goes to that of its place. Nothing under the label: nothing.

        Args:
            per_prompt: a chunk for each prompt, with all its samples.

        Raises:
            CheckpointError: a file cannot be read, or is something else.
        """
        ...


class ActorRole(Protocol):
    def offload_states(self, include: Sequence[str] | None = None) -> object:
        """Weights, gradients and optimizer state to host memory; harmless when they are there."""
        ...

    def train_step(self, batch: Sequence[ScoredChunk], meta: Mapping[str, Any] | None = None) -> TrainStats:
        """One optimizer step on the whole batch.

        Args:
            meta: {"is_offload_states": ...}: do the states go to host memory after it? None: as the settings say.
        """
        ...

    def evaluate(
        self, batch: Sequence[ScoredChunk], *, keep_tokens: int = 0, meta: Mapping[str, Any] | None = None
    ) -> TrainStats:
        """The same loss, nothing learned; with the numbers of each token of the first `keep_tokens` sequences."""
        ...

    def save(self, folder: Path) -> None:
        """Start a save: returns when every rank has a host copy of its state, so that training may go on.

        The files appear in the background in `folder`, which is not there yet; its parent is.
        """
        ...

    def save_finished(self, *, wait: bool, timeout_s: float | None = None) -> dict[str, FileDigest] | None:
        """What the save wrote: file, relative to its folder, in POSIX form -> digest. All of it has reached the disk.

        Answered also while a rank is busy with another call, or hangs in it.

        Args:
            wait: block until all is written. Otherwise None = not yet.
            timeout_s: for how long at most; None: trainer.stage_timeout_s.

        Raises:
            CheckpointError: a rank could not write.
            ClusterError: a rank died, or did not answer in time.
        """
        ...

    def load(self, folder: Path) -> None:
        """Continue from the files of an earlier save, which may be one of another layout. Raises CheckpointError."""
        ...

    def export_hf(self, folder: Path) -> None: ...

    def memory_numbers(self) -> dict[str, float]:
        """Since the last call: memory of all ranks in each phase, see `gkd.memory.timeline`, and what it cost to move
        their states, see `gkd.memory.offload_manager`; metric name -> the largest value of all ranks.
        """
        ...


class ReferenceHandle(Protocol):
    def wait(self) -> list[ScoredChunk]:
        """The batch, with `ScoredChunk.reference`. Raises what a rank failed with."""
        ...


class ReferenceRole(Protocol):
    def compute_logprobs(self, batch: Sequence[ScoredChunk], *, blocking: bool = True) -> ReferenceHandle:
        """What a frozen model says of the tokens of a batch; a call on the actor, so one of those who may call it.

        Args:
            blocking: wait for all ranks. Else the caller does, with the handle.
        """
        ...


class WeightSyncRole(Protocol):
    def push(self, policy_version: int) -> SyncReport:
        """Every rollout engine holds the actor's weights when this returns."""
        ...
