"""Data types of the pipeline.

    Prompt -> Rollout (+ TeacherScores) -> MicroBatch (with its TokenTargets)

Types up to `TeacherScores` hold numpy arrays, because they cross process borders through shared memory and raw network
frames. `MicroBatch` holds torch tensors for training.

Shape letters, used in the whole project: P prompt tokens, R response tokens, M of them are the student's own (all
without an environment), K top-k entries, B sequences of a micro-batch, S padded sequence length, N loss tokens of a
micro-batch, V vocabulary, D hidden size of the teacher.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from gkd.spans import ProcessSpans
from teacher_server.vision.images import EncodedImage
from teacher_server.wire.protocol import Signal
from teacher_server.wire.table import TopKTable

if TYPE_CHECKING:
    import torch

    from gkd.text.targets import TextTargets


# How a response ended: with an end token; at data.max_response_length; by a rule of `rollout.environment`, for example
# after rollout.max_turns; by an error of the environment. Its position is the code of `RolloutChunk.endings`.
FINISH_REASONS = ("stop", "length", "environment", "environment_error")


class Prompt(msgspec.Struct, frozen=True, array_like=True):
    """One row of a prompt file, tokenized. The engines receive it through `gkd.rollout.messages`."""

    prompt_id: int  # row number over all files; stable between runs
    token_ids: np.ndarray  # [P] int32
    answer: str | None = None  # reference answer, for evaluation only
    response_ids: np.ndarray | None = None  # [R] int32, the dataset's response including its end-of-sequence token
    route: int = 0  # its teacher, in `gkd.config.schema.Derived.routes`
    teacher_ids: np.ndarray | None = None  # [P'] int32, the prompt for the teacher; None means prompt_ids
    row: bytes | None = None  # see `gkd.data.row_files`; None means no function needs it
    own: np.ndarray | None = None  # [R] bool, the assistant's own tokens of response_ids; None means all
    images: tuple[EncodedImage, ...] = ()  # in the order of their placeholders in token_ids and in teacher_ids


@dataclass(frozen=True, slots=True)
class ResponseLimits:
    """Limits of the responses of a batch."""

    tokens: int
    turns: int  # with an environment


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Response tokens [start, stop) were generated with the student weights `policy_version`."""

    start: int
    stop: int
    policy_version: int


@dataclass(frozen=True, slots=True)
class Rollout:
    """A prompt with a response: sampled from the student, with its logprobs, or taken from the dataset.

    With an environment the response is a trajectory: the student's turns, and between them the observations that the
    student read. Only the student's own tokens are scored and trained on, so every table has M rows, one for each.
    """

    prompt_id: int
    sample_index: int  # unique in its batch: prompt_index * rollout.n + index of the sample
    prompt_ids: np.ndarray  # [P] int32
    response_ids: np.ndarray  # [R] int32; ends with the end-of-sequence token if finish_reason == "stop"
    rollout_logprobs: np.ndarray  # [M] float32, nats, of the engine's sampling distribution; zeros if off-policy
    version_spans: tuple[VersionSpan, ...]  # empty if off-policy
    finish_reason: str  # one of FINISH_REASONS
    on_policy: bool = True  # False: the response is from the dataset
    route: int = 0  # the prompt's route
    teacher_ids: np.ndarray | None = None  # [P'] int32, the prompt for the teacher; None means prompt_ids
    # Computed from the rewards of the batch, and added on the training ranks.
    advantage: float | None = None
    factor: float = 1.0  # of its loss, see distill.response_weight
    top_ids: np.ndarray | None = None  # [M, G] int32, the student's most probable ids, for distill.support; on-policy
    own: np.ndarray | None = None  # [R] bool, the student's own tokens, at least one; None means all
    reward: float | None = None  # the environment's; None: it gives none
    messages: bytes | None = None  # JSON, turns and observations as messages; None without an environment
    first_turn: int = 0  # the turn of the first own token; above 0 if distill.skip_first_tokens has left turns out
    images: tuple[EncodedImage, ...] = ()  # the prompt's; the samples of a prompt share the objects

    @property
    def policy_version(self) -> int:
        """Return the oldest version that generated a part of it, which defines its staleness. On-policy only."""
        return min(span.policy_version for span in self.version_spans)

    @property
    def version_span(self) -> int:
        """Return how often the weights changed while it was generated."""
        return self.version_spans[-1].policy_version - self.version_spans[0].policy_version

    @property
    def n_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)

    @property
    def own_ids(self) -> np.ndarray:
        """Return [M] int32, the student's own tokens of the response."""
        return self.response_ids if self.own is None else self.response_ids[self.own]

    @property
    def last_turn(self) -> np.ndarray:
        """Return [n] int32, the tokens of the student's last turn; all of them without an environment."""
        if self.own is None:
            return self.response_ids
        stop = int(np.flatnonzero(self.own)[-1]) + 1
        observed = np.flatnonzero(~self.own[:stop])
        return self.response_ids[int(observed[-1]) + 1 if len(observed) else 0 : stop]

    @property
    def n_turns(self) -> int:
        """Return the runs of consecutive own tokens: the student's turns."""
        return 1 if self.own is None else int(np.count_nonzero(np.diff(self.own, prepend=False) & self.own))

    @property
    def n_own(self) -> int:
        """Return M, the rows of every table of this sequence."""
        return len(self.response_ids) if self.own is None else int(np.count_nonzero(self.own))

    def for_teacher(self) -> Rollout:
        """Return the sequence that the teacher scores: its own prompt, if it has one, and the same response."""
        return self if self.teacher_ids is None else replace(self, prompt_ids=self.teacher_ids)


@dataclass(frozen=True, slots=True)
class TeacherScores:
    """Teacher scores of one sequence: the signals that `teacher.signal` and the loss require; others are None."""

    topk: TopKTable | None = None  # `sampled` is None: it is `sampled_logprobs` below
    sampled_logprobs: np.ndarray | None = None  # [M] float32, nats, of the own tokens
    # [M, V] float32 or float16, over the common vocabulary, divided by the temperature.
    logits: np.ndarray | None = None
    # [M, D] float32, final hidden states; hidden @ lm_head.T = logits before the temperature.
    hidden: np.ndarray | None = None
    # [R'] int32, the response in the tokens of a teacher with another tokenizer: the rows of its tables in place of M.
    response_ids: np.ndarray | None = None
    # [M] float32, nats, reference logprobs of the own tokens; added on the training ranks.
    reference_logprobs: np.ndarray | None = None


# Field of `TeacherScores` that holds a signal's table.
SIGNAL_FIELDS: dict[Signal, str] = {
    "topk": "topk",
    "sampled": "sampled_logprobs",
    "logits": "logits",
    "hidden": "hidden",
}


_OF_LISTS = ("topk_ids", "topk_logprobs", "tail_mass", "sampled_logprobs")


@dataclass(slots=True)
class TokenTargets:
    """Targets of N loss rows. Tables that the loss does not use are None."""

    sampled_ids: torch.Tensor  # [N] int64, the response token that the row predicts
    rollout_logprobs: torch.Tensor  # [N] float32, nats; 0 where the row is not on-policy
    on_policy: torch.Tensor  # [N] bool; False: the token is from the dataset
    topk_ids: torch.Tensor | None = None  # [N, K] int64, distinct in a row; -1 beyond the row's count
    topk_logprobs: torch.Tensor | None = None  # [N, K] float32, nats; -inf beyond the row's count
    tail_mass: torch.Tensor | None = None  # [N] float32, teacher probability outside the list
    sampled_logprobs: torch.Tensor | None = None  # [N] float32, nats, of the teacher for sampled_ids
    logits: torch.Tensor | None = None  # [N, V] of the teacher, divided by the temperature; stays on the host
    hidden: torch.Tensor | None = None  # [N, D] final hidden states of the teacher; stays on the host
    reference_logprobs: torch.Tensor | None = None  # [N] float32, nats, of the reference for sampled_ids
    # [N] bool, the tokens with which the student ended a turn; False for truncated and dataset responses.
    ends: torch.Tensor | None = None
    routes: torch.Tensor | None = None  # [N] int64, see `Rollout.route`; None on a rank without data
    turns: torch.Tensor | None = None  # [N] int64, the row's turn, counted from 0 in its trajectory
    advantages: torch.Tensor | None = None  # [N] float32, of the reward of each token's response
    weights: torch.Tensor | None = None  # [N] float32, factor of the loss, see `gkd.data.collate`; None means all 1
    sequences: torch.Tensor | None = None  # [N] int64, the row's sequence, counted from 0 in the micro-batch
    text: TextTargets | None = None  # positions of the text, if the tables have the rows of other tokens

    def __len__(self) -> int:
        return int(self.sampled_ids.numel())

    def rows(self, rows: slice | torch.Tensor) -> TokenTargets:
        """Return these rows, views if they are a slice, without `text` and the tables of its tokens."""
        left_out = () if self.text is None else ("text", "hidden", *_OF_LISTS)
        return self._each(lambda name, table: None if name in left_out else table[rows])

    def on(self, device: torch.device) -> TokenTargets:
        """Move all tables to `device` except `logits` and `hidden`, which the loss moves in chunks."""
        return self._each(lambda name, table: table if name in ("logits", "hidden", "text") else table.to(device))

    def _each(self, change: Callable[[str, Any], Any]) -> TokenTargets:
        tables = {item.name: getattr(self, item.name) for item in fields(self)}
        return replace(self, **{name: change(name, table) for name, table in tables.items() if table is not None})


@dataclass(slots=True)
class MicroBatch:
    """Inputs of one forward pass. The loss rows are a flat list, so targets are not padded to [B, S, K].

    Padded: B sequences, each right-padded to S tokens. Packed ("thd"): B = 1, the sequences are concatenated in one
    row, and attention and positions restart at each of `cu_seqlens`.

    Logits at position t predict token t + 1. Response token j of a sequence with P prompt tokens is therefore predicted
    at position P - 1 + j. A sequence has a loss row for each of its M own tokens, the end-of-sequence token included.
    """

    tokens: torch.Tensor  # [B, S] int64
    position_ids: torch.Tensor  # [B, S] int64, counted from 0 in each sequence
    loss_index: torch.Tensor  # [N] int64, indices of the flattened [B * S] positions
    targets: TokenTargets | None  # None on ranks that compute no loss
    samples: tuple[tuple[int, int], ...] = ()  # (sample_index, number of rows) per sequence, in row order
    # [n_sequences + 1] int32, packed only: sequence i is columns cu_seqlens[i] .. cu_seqlens[i + 1]; from 0 to S.
    cu_seqlens: torch.Tensor | None = None
    images: tuple[
        tuple[EncodedImage, ...], ...
    ] = ()  # one entry for each sequence, in row order; empty: no sequence has any

    @property
    def n_loss_tokens(self) -> int:
        return int(self.loss_index.numel())


@dataclass(frozen=True, slots=True)
class RolloutChunk:
    """Handle of finished rollouts of one data-parallel group, possibly of several prompts; or of a part of them.

    The driver reads its sizes. Tokens and scores stay in the object stores of the hosts that made them; `ref` names
    them there, and is opaque to the driver.
    """

    dp_rank: int  # group whose endpoint scores it; `gkd.data.scatter` may assign some sequences to other groups
    ref: Any  # points to list[Rollout] in an object store; with `sequence_indices` only some of them
    # [8, n_sequences] int32, in the order of the rollouts: the properties below. Row 5: sequences of 4 consecutive own
    # tokens that occur earlier in the same response.
    sizes: np.ndarray
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
        """Return the student's own tokens of the response."""
        return self.sizes[2]

    @property
    def endings(self) -> np.ndarray:
        """Return how each response ended, an index of FINISH_REASONS."""
        return self.sizes[3]

    @property
    def versions(self) -> np.ndarray:
        """Return the oldest policy version that generated a part; for dataset responses the current one."""
        return self.sizes[4]

    @property
    def n_observed(self) -> np.ndarray:
        """Return the tokens of the response that the environment wrote."""
        return self.sizes[6]

    @property
    def n_turns(self) -> np.ndarray:
        """Return the student's turns, 1 without an environment."""
        return self.sizes[7]


@dataclass(frozen=True, slots=True)
class PendingScores:
    """A rollout chunk that was submitted to the teacher; the scores may still be pending."""

    rollouts: RolloutChunk
    ref: Any  # see ScoredChunk; exists before the scores do
    summary: Any  # handle of a `ScoreSummary`'s bytes, of all sequences in the list of `rollouts.ref`
    rewards: Any = None  # handle of the bytes of `Judging.judge`, of the same sequences; None: not judged


@dataclass(frozen=True, slots=True, eq=False)
class ScoreTimes:
    """Times of a scored chunk: submission, and completion of each sequence. Seconds since the epoch, host clock."""

    submitted_s: float
    completed_s: np.ndarray  # [n_sequences] float64


@dataclass(frozen=True, slots=True)
class ScoredChunk:
    """A rollout chunk and the handle of its teacher scores."""

    rollouts: RolloutChunk
    ref: Any  # points to list[TeacherScores] in the same order; only the last pipeline stage fetches it
    # The teacher's mass on its top-k, sum over the own tokens of their sequence's mean; None: no top-k was requested.
    teacher_mass: float | None
    n_teacher_bytes: int
    times: ScoreTimes | None = None  # None: scored before the run resumed, or by a local teacher
    # Handle of the reference's logprobs, list of [R] float32 in the same order; None: not requested.
    reference: Any = None
    # [n_sequences, functions] float64, see `gkd.scoring.reward`; NaN: unknown, see `Undecided`. None: not judged.
    rewards: np.ndarray | None = None
    # [n_sequences, 2] float64, see `gkd.scoring.reward.judging.Judging.judge`, or no columns; None: not judged.
    of_group: np.ndarray | None = None
    # [n_sequences, 2] float32, `Rollout.advantage` and `Rollout.factor`; None: no setting needs them.
    numbers: np.ndarray | None = None


@dataclass(frozen=True, slots=True)
class InFlight:
    """Rollouts that were started and not yet trained on. Checkpoints store them, so a resumed run continues them."""

    position: int  # place in the sampler's order, see `TrainerState.sampler_position`
    unfinished: tuple[int, ...] = ()  # positions without a finished rollout; generated again after a resume
    chunks: Mapping[str, Sequence[PendingScores]] = field(default_factory=dict)  # finished rollouts, by label


@dataclass(frozen=True, slots=True)
class FileDigest:
    """Size and checksum of a file as it was written, to detect later damage."""

    n_bytes: int
    xxh3_128: str  # 32 hex digits


@dataclass(frozen=True, slots=True)
class Recording:
    """Files that are being written: name of the writer -> handle of the files' digests."""

    refs: dict[str, Any]


@dataclass(frozen=True, slots=True)
class EngineUsage:
    """Counters of one engine since the previous `usage` call."""

    busy_s: float  # time in forward passes
    memory: Mapping[str, float] = field(default_factory=dict)  # metric name -> peak value
    spans: ProcessSpans | None = None  # None: not recorded


@dataclass(frozen=True, slots=True)
class EngineRestarts:
    """Rollout engines that were started again because they died or hung."""

    restarts: int = 0  # restarts that succeeded
    seconds: float = 0.0  # sum over them, from the failure until the engine held the current weights
    prompts: int = 0  # generated again

    def plus(self, restarts: int = 0, seconds: float = 0.0, prompts: int = 0) -> EngineRestarts:
        return EngineRestarts(self.restarts + restarts, self.seconds + seconds, self.prompts + prompts)


@dataclass(frozen=True, slots=True)
class RolloutUsage:
    """Counters of the rollout pool since the previous `usage` call."""

    engines: Sequence[EngineUsage]  # one for each that is up
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

    @staticmethod
    def merged(healths: Sequence[TeacherHealth]) -> TeacherHealth | None:
        """Return the health by all of these clients: the longest silence and its route, the sum of their requests."""
        if not healths:
            return None
        silent = max(healths, key=lambda health: health.silent_s)
        newest: dict[str, TeacherHealth] = {}
        for health in healths:
            newest[health.route] = min(newest.get(health.route, health), health, key=lambda report: report.silent_s)
        return TeacherHealth(
            silent.silent_s,
            silent.budget_s,
            sum(health.n_in_flight for health in healths),
            sum(health.n_workers for health in newest.values()),
            sum(health.n_queued for health in newest.values()),
            silent.route if len(newest) == 1 or silent.silent_s else "",
        )


@dataclass(frozen=True, slots=True)
class TokenRecord:
    """Loss terms of each own token of one sequence, for inspection; `gkd.tools.report` shows them."""

    prompt_id: int
    sample_index: int
    prompt_ids: list[int]
    response_ids: list[int]
    values: dict[str, list[float]]  # field of `gkd.loss.token_loss.TokenLosses` -> nats or probabilities
    # Per own token the teacher's most probable tokens: (id, probability of the teacher, of the student). Empty: it sent
    # no distribution.
    choices: list[list[tuple[int, float, float]]] = field(default_factory=list)
    observed: list[int] = field(default_factory=list)  # positions in response_ids of tokens that are not its own


@dataclass(frozen=True, slots=True)
class TrainStats:
    """Result of one global batch; identical on every rank."""

    loss: float  # token mean over the global batch, nats; NaN without a loss token, as grad_norm
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


@dataclass(frozen=True, slots=True)
class Sample:
    """A prompt and the student's response, for inspection and for checks of the exported model.

    With eval.metric the response is greedy and `correct` its judgement; else it is sampled, and `correct` None.
    """

    prompt_id: int
    prompt_ids: list[int]
    response_ids: list[int]
    text: str
    answer: str
    correct: bool | None
    prompt: str  # with its special tokens
    truncated: bool = False
    # Four fields of the environment: turns and observations, positions of observed tokens, reward, whether it failed.
    messages: list[dict[str, str]] = field(default_factory=list)
    observed: list[int] = field(default_factory=list)
    reward: float | None = None
    failed: bool = False


@dataclass(frozen=True, slots=True)
class GreedyReport:
    """Greedy responses to the validation prompts."""

    accuracy: float  # share of exact matches
    samples: list[Sample]  # the first few, in prompt order
    by_route: Mapping[int, float] = field(default_factory=dict)  # accuracy of the prompts of each route
