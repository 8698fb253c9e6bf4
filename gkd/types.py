"""Data types of the pipeline.

    Prompt -> Rollout (+ TeacherScores) -> MicroBatch (with its TokenTargets)

Types up to `TeacherScores` hold numpy arrays, because they cross process borders through shared memory and raw network
frames. `MicroBatch` holds torch tensors for training.

Shape letters, used in the whole project: P prompt tokens, R response tokens, K top-k entries, B sequences of a
micro-batch, S padded sequence length, N loss tokens of a micro-batch, V vocabulary, D hidden size of the teacher.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from teacher_server.wire.protocol import Signal

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row of a prompt file, tokenized."""

    prompt_id: int  # row number over all files; stable between runs
    token_ids: np.ndarray  # [P] int32
    answer: str | None = None  # reference answer, for evaluation only
    response_ids: np.ndarray | None = None  # [R] int32, the dataset's response including its end-of-sequence token
    route: int = 0  # its teacher, in `gkd.config.derived.Derived.routes`
    teacher_ids: np.ndarray | None = None  # [P'] int32, the prompt for the teacher; None means prompt_ids
    row: bytes | None = None  # see `gkd.data.rows`; None means no function needs it


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Response tokens [start, stop) were generated with the student weights `policy_version`."""

    start: int
    stop: int
    policy_version: int


@dataclass(frozen=True, slots=True)
class Rollout:
    """A prompt with a response: sampled from the student, with its logprobs, or taken from the dataset."""

    prompt_id: int
    sample_index: int  # unique in its batch: prompt_index * rollout.n + index of the sample
    prompt_ids: np.ndarray  # [P] int32
    response_ids: np.ndarray  # [R] int32; ends with the end-of-sequence token if finish_reason == "stop"
    rollout_logprobs: np.ndarray  # [R] float32, nats, of the engine's sampling distribution; zeros if off-policy
    version_spans: tuple[VersionSpan, ...]  # empty if off-policy
    finish_reason: str  # "stop" | "length"
    on_policy: bool = True  # False: the response is from the dataset
    route: int = 0  # the prompt's route
    teacher_ids: np.ndarray | None = None  # [P'] int32, the prompt for the teacher; None means prompt_ids
    advantage: float | None = None  # computed from the reward; added on the training ranks if the loss needs it
    top_ids: np.ndarray | None = None  # [R, G] int32, the student's most probable ids, for distill.support; on-policy

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

    def for_teacher(self) -> Rollout:
        """Return the sequence that the teacher scores: its own prompt, if it has one, and the same response."""
        return self if self.teacher_ids is None else replace(self, prompt_ids=self.teacher_ids)


@dataclass(frozen=True, slots=True)
class TeacherTopK:
    """The teacher's K most probable tokens at each response position, or the tokens of distill.support.

    Normalized over the full (common) vocabulary at the request's temperature *before* the truncation to K, so
    `exp(topk_logprobs).sum(-1)` is the teacher's true mass on these ids (<= 1). With a mass target, a row lists only as
    many ids as needed to reach it: `counts` ids, followed by entries -1 and -inf.
    """

    topk_ids: np.ndarray  # [R, K] int32
    topk_logprobs: np.ndarray  # [R, K] float32, nats, descending
    tail_mass: np.ndarray  # [R] float32, teacher probability outside the listed ids
    counts: np.ndarray | None = None  # [R] int32, number of listed ids per row, 1..K; None means all K


@dataclass(frozen=True, slots=True)
class TeacherScores:
    """Teacher scores of one sequence: the signals that `teacher.signal` and the loss require; others are None."""

    topk: TeacherTopK | None = None
    sampled_logprobs: np.ndarray | None = None  # [R] float32, nats, of the response tokens
    # [R, V] float32 or float16, over the common vocabulary, divided by the temperature.
    logits: np.ndarray | None = None
    hidden: np.ndarray | None = (
        None  # [R, D] float32, final hidden states; hidden @ lm_head.T = logits before the temperature
    )
    # [R] float32, nats, reference logprobs of the response tokens; added on the training ranks.
    reference_logprobs: np.ndarray | None = None


# Field of `TeacherScores` that holds a signal's table.
SIGNAL_FIELDS: dict[Signal, str] = {
    "topk": "topk",
    "sampled": "sampled_logprobs",
    "logits": "logits",
    "hidden": "hidden",
}


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
    # [N] bool, the token with which the student ended its response; False for truncated and dataset responses.
    ends: torch.Tensor | None = None
    routes: torch.Tensor | None = None  # [N] int64, see `Rollout.route`; None on a rank without data
    advantages: torch.Tensor | None = None  # [N] float32, of the reward of each token's response
    weights: torch.Tensor | None = None  # [N] float32, factor of the loss, see `gkd.data.normalize`; None means all 1
    sequences: torch.Tensor | None = None  # [N] int64, the row's sequence, counted from 0 in the micro-batch

    def __len__(self) -> int:
        return int(self.sampled_ids.numel())

    def rows(self, rows: slice) -> TokenTargets:
        """Return views of these rows."""
        return self._each(lambda name, table: table[rows])

    def on(self, device: torch.device) -> TokenTargets:
        """Move all tables to `device` except `logits` and `hidden`, which the loss moves in chunks."""
        return self._each(lambda name, table: table if name in ("logits", "hidden") else table.to(device))

    def _each(self, change: Callable[[str, torch.Tensor], torch.Tensor]) -> TokenTargets:
        changed: dict[str, Any] = {}
        for item in fields(self):
            table: torch.Tensor | None = getattr(self, item.name)
            changed[item.name] = None if table is None else change(item.name, table)
        return TokenTargets(**changed)


@dataclass(slots=True)
class MicroBatch:
    """Inputs of one forward pass. The loss rows are a flat list, so targets are not padded to [B, S, K].

    Padded: B sequences, each right-padded to S tokens. Packed ("thd"): B = 1, the sequences are concatenated in one
    row, and attention and positions restart at each of `cu_seqlens`.

    Logits at position t predict token t + 1. Response token j of a sequence with P prompt tokens is therefore predicted
    at position P - 1 + j: R loss rows per sequence, including the end-of-sequence token.
    """

    tokens: torch.Tensor  # [B, S] int64
    position_ids: torch.Tensor  # [B, S] int64, counted from 0 in each sequence
    loss_index: torch.Tensor  # [N] int64, indices of the flattened [B * S] positions
    targets: TokenTargets | None  # None on ranks that compute no loss
    samples: tuple[tuple[int, int], ...] = ()  # (sample_index, number of rows) per sequence, in row order
    # [n_sequences + 1] int32, packed only: sequence i is columns cu_seqlens[i] .. cu_seqlens[i + 1]; from 0 to S.
    cu_seqlens: torch.Tensor | None = None

    @property
    def n_loss_tokens(self) -> int:
        return int(self.loss_index.numel())
