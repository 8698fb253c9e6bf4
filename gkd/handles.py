"""Handles and reports that the pools return to the driver.

The driver reads sizes and numbers. Tokens and scores stay in the object stores of the hosts that made them; a handle's
`ref` names them there and is opaque to the driver.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

# Spans of time


class Span(msgspec.Struct, frozen=True, omit_defaults=True):  # many are sent and encoded: cheaper than a dataclass
    """Something that a process did, for the trace of a run."""

    name: str
    start_s: float  # since the epoch, on the clock of the process's host
    duration_s: float
    args: Mapping[str, float] = {}  # "lane": row of its process; see gkd.metrics.spans


class ProcessSpans(msgspec.Struct, frozen=True):
    """Spans of one process since it was last read."""

    process: str  # "driver", "actor 0", "engine 0", "scoring 0" or "teacher <name>"
    host: str
    spans: Sequence[Span]


@dataclass(frozen=True, slots=True)
class Computation:
    """A batch that a worker of the teacher server computed, as a scoring endpoint learns of it."""

    worker: str
    received_s: float  # first reply of the batch; since the epoch, on the clock of the endpoint's host
    queue_s: float  # that this request waited at the server
    compute_s: float
    n_sequences: int  # of this endpoint


# Rollouts and scores


@dataclass(frozen=True, slots=True)
class RolloutChunk:
    """Handle of finished rollouts of one data-parallel group, possibly of several prompts; or of a part of them."""

    dp_rank: int  # group whose endpoint scores it; `gkd.data.balance` may assign some sequences to other groups
    ref: Any  # of list[Rollout], in an object store; with `sequence_indices` only some of them
    sizes: np.ndarray  # [6, n_sequences] int32, in the order of the rollouts; its rows are the properties below
    on_policy: bool = True  # False: responses from the dataset
    sequence_indices: np.ndarray | None = None  # [n_sequences] positions in the list of `ref`, ascending; None: all

    @property
    def n_sequences(self) -> int:
        return self.sizes.shape[1]

    @property
    def sample_index(self) -> np.ndarray:
        """Return the sample index of each sequence, see `Rollout`."""
        return self.sizes[0]

    @property
    def n_tokens(self) -> np.ndarray:
        """Return the tokens of prompt and response."""
        return self.sizes[1]

    @property
    def n_response(self) -> np.ndarray:
        """Return the tokens of the response."""
        return self.sizes[2]

    @property
    def truncated(self) -> np.ndarray:
        """Return 1 for each response that reached max_response_length, else 0."""
        return self.sizes[3]

    @property
    def versions(self) -> np.ndarray:
        """Return the oldest policy version that generated a part; for dataset responses the current one."""
        return self.sizes[4]

    @property
    def n_repeated_4grams(self) -> np.ndarray:
        """Return how many sequences of 4 consecutive response tokens occur earlier in the same response."""
        return self.sizes[5]


@dataclass(frozen=True, slots=True)
class PendingScores:
    """A rollout chunk that was submitted to the teacher; the scores may still be pending."""

    rollouts: RolloutChunk
    ref: Any  # see ScoredChunk; exists before the scores do
    summary: Any  # handle of a `ScoreSummary`'s bytes, of all sequences in the list of `rollouts.ref`
    rewards: Any = None  # handle of the values' bytes, of the same sequences; None: not judged


@dataclass(frozen=True, slots=True, eq=False)
class ScoreTimes:
    """Times of a scored chunk: submission, and completion of each sequence. Seconds since the epoch, host clock."""

    submitted_s: float
    completed_s: np.ndarray  # [n_sequences] float64


@dataclass(frozen=True, slots=True)
class ScoredChunk:
    """A rollout chunk and the handle of its teacher scores."""

    rollouts: RolloutChunk
    ref: Any  # of list[TeacherScores], in the same order; only the last pipeline stage fetches it
    teacher_mass: float | None  # sum over positions of the teacher's mass on its top-k; None: no top-k was requested
    n_teacher_bytes: int
    times: ScoreTimes | None = None  # None: scored before the run resumed, or by a local teacher
    # Handle of the reference's logprobs, list of [R] float32 in the same order; None: not requested.
    reference: Any = None
    rewards: np.ndarray | None = None  # [n_sequences, functions] float64, see `gkd.reward`; None: not judged
    n_undecided: int = 0  # numbers of `rewards` that are 0 because the function reached a time limit of its own
    advantages: np.ndarray | None = None  # [n_sequences] float32; None: the loss has no rewards


@dataclass(frozen=True, slots=True)
class InFlight:
    """Rollouts that were started and not yet trained on. Checkpoints store them, so a resumed run continues them."""

    position: int  # in the sampler's order, see `TrainerState.sampler_position`
    unfinished: tuple[int, ...] = ()  # positions without a finished rollout; generated again after a resume
    chunks: Mapping[str, Sequence[PendingScores]] = field(default_factory=dict)  # finished rollouts, by label


@dataclass(frozen=True, slots=True)
class EngineUsage:
    """Counters of one engine since the previous `usage` call."""

    busy_s: float  # in forward passes
    gap_s: float  # between passes while sequences were unfinished: finished rollouts were handed over
    products: np.ndarray  # [4, 4] float64: sum over passes of x x^T with x = (1, b, p, seconds)
    longest_response: int  # tokens of the longest response that finished; 0 if none did
    memory: Mapping[str, float] = field(default_factory=dict)  # metric name -> peak value
    spans: ProcessSpans | None = None  # None: not recorded


@dataclass(frozen=True, slots=True)
class EngineRestarts:
    """Rollout engines that were started again because they died or hung."""

    restarts: int = 0  # that succeeded
    seconds: float = 0.0  # sum over them, from the failure until the engine held the current weights
    prompts: int = 0  # generated again

    def plus(self, restarts: int = 0, seconds: float = 0.0, prompts: int = 0) -> EngineRestarts:
        return EngineRestarts(self.restarts + restarts, self.seconds + seconds, self.prompts + prompts)


@dataclass(frozen=True, slots=True)
class RolloutUsage:
    """Counters of the rollout pool since the previous `usage` call."""

    engines: Sequence[EngineUsage]  # of those that are up
    generate_s: float  # time in `generate`, from its first call to an engine to its last chunk
    memory: Mapping[str, float] = field(default_factory=dict)  # metric name -> maximum over the engines
    restarts: EngineRestarts = EngineRestarts()


@dataclass(frozen=True, slots=True)
class TeacherHealth:
    """Hold what the clients of the teacher server have heard from it.

    Args:
        silent_s: time for which a client with pending requests has heard nothing; 0 without pending requests.
        budget_s: silence after which the run ends: teacher.outage_budget_s.
        n_in_flight: requests that are not answered, including those that wait in a client.
        n_workers, n_queued: workers and waiting requests of the server, by its last heartbeat.
        route: name of the teacher that is silent, one of teacher.routes; empty: the only one.
    """

    silent_s: float
    budget_s: float
    n_in_flight: int
    n_workers: int
    n_queued: int
    route: str = ""

    @property
    def label(self) -> str:
        """Return "teacher", with several of them and the route."""
        return f"teacher {self.route}".rstrip()


# Training


@dataclass(frozen=True, slots=True)
class TokenRecord:
    """Loss terms of each response token of one sequence, for inspection; `gkd.tools.report` shows them."""

    prompt_id: int
    sample_index: int
    prompt_ids: list[int]
    response_ids: list[int]
    values: dict[str, list[float]]  # field of `gkd.loss.token_loss.TokenLosses` -> nats or probabilities
    # Per response token the teacher's most probable tokens: (id, probability of the teacher, of the student). Empty: it
    # sent no distribution.
    choices: list[list[tuple[int, float, float]]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class TrainStats:
    """Result of one global batch; identical on every rank."""

    loss: float  # token mean over the global batch, nats
    n_loss_tokens: int
    grad_norm: float = 0.0  # global, before clipping; 0 in evaluation
    lr: float = 0.0  # learning rate of this update; 0 in evaluation
    extra: dict[str, float] = field(default_factory=dict)  # metric name -> value
    tokens: list[TokenRecord] = field(default_factory=list)  # only for evaluations with keep_tokens


@dataclass(frozen=True, slots=True)
class SyncReport:
    """Result of one weight sync."""

    n_bytes: int
    verified_tensors: int  # 0 = not verified this time


# Evaluation


@dataclass(frozen=True, slots=True)
class Sample:
    """One validation prompt and its greedy response, for inspection and for checks of the exported model."""

    prompt_id: int
    prompt_ids: list[int]
    response_ids: list[int]
    text: str
    answer: str
    correct: bool
    prompt: str  # with its special tokens
    truncated: bool = False


@dataclass(frozen=True, slots=True)
class GreedyReport:
    """Greedy responses to the validation prompts."""

    accuracy: float  # share of exact matches
    samples: list[Sample]  # the first few, in prompt order
    by_route: Mapping[int, float] = field(default_factory=dict)  # accuracy of the prompts of each route


# Files


@dataclass(frozen=True, slots=True)
class FileDigest:
    """Size and checksum of a file as it was written, to detect later damage."""

    n_bytes: int
    xxh3_128: str  # 32 hex digits


@dataclass(frozen=True, slots=True)
class Recording:
    """Files that are being written: name of the writer -> handle of the files' digests."""

    refs: dict[str, Any]
