"""The things that travel along the road of one batch.

    Prompt -> Rollout (+ TeacherScores) -> MicroBatch (with its TokenTargets)

Everything up to `TeacherScores` is numpy, because it crosses process borders through shared
memory and raw network frames; `MicroBatch` is torch, because it is what a rank trains on.

Shape letters, here and everywhere: P prompt tokens, R response tokens, K top-k entries,
B sequences of a micro-batch, S padded sequence length, N loss tokens of a micro-batch, V vocabulary,
D hidden size of the teacher.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row of a prompt file, tokenized."""

    prompt_id: int  # row number over all files; stable between runs, so a resume can name it
    token_ids: np.ndarray  # [P] int32
    answer: str | None = None  # reference answer, for evaluation only
    response_ids: np.ndarray | None = None  # [R] int32, the dataset's response, its end-of-sequence token included


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Response tokens [start, stop) were written by the student of `policy_version`."""

    start: int
    stop: int
    policy_version: int


@dataclass(frozen=True, slots=True)
class Rollout:
    """A prompt and an answer to it: the student's, with the logprobs it was sampled under, or the dataset's."""

    prompt_id: int
    sample_index: int  # unique in its batch: place of the prompt there x `rollout.n` + which of its samples
    prompt_ids: np.ndarray  # [P] int32
    response_ids: np.ndarray  # [R] int32; ends with the end-of-sequence token if finish_reason == "stop"
    rollout_logprobs: np.ndarray  # [R] float32, nats, of the engine's sampling distribution; zeros for the dataset's
    version_spans: tuple[VersionSpan, ...]  # empty for the dataset's
    finish_reason: str  # "stop" | "length"
    on_policy: bool = True  # False: the dataset's response

    @property
    def policy_version(self) -> int:
        """The oldest version that wrote a part of it: the one staleness is measured against. Student's answers only."""
        return min(span.policy_version for span in self.version_spans)

    @property
    def n_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)


@dataclass(frozen=True, slots=True)
class TeacherTopK:
    """What the teacher says of each response token: its K most probable tokens there.

    Normalised over the full (common) vocabulary at the request's temperature *before* the
    truncation to K, so `exp(topk_logprobs).sum(-1)` is the teacher's true mass on those ids (<= 1).
    With a mass target a row lists only as many ids as it takes to reach that mass: `counts` says how
    many, and its other entries are -1 and -inf.
    """

    topk_ids: np.ndarray  # [R, K] int32
    topk_logprobs: np.ndarray  # [R, K] float32, nats, descending
    tail_mass: np.ndarray  # [R] float32, the teacher's probability outside the listed ids
    counts: np.ndarray | None = None  # [R] int32, 1..K listed ids of each row; None: all K


@dataclass(frozen=True, slots=True)
class TeacherScores:
    """The teacher's answer about one sequence: whatever `teacher.signal` and the loss ask for, the rest None."""

    topk: TeacherTopK | None = None
    sampled_logprobs: np.ndarray | None = None  # [R] float32, nats, of the response tokens
    # [R, V] float32 or float16, over the common vocabulary, divided by the temperature.
    logits: np.ndarray | None = None
    hidden: np.ndarray | None = None  # [R, D] float32, final hidden states; times the LM head: logits, not yet divided
    # [R] float32, nats, the reference's of the response tokens; it joins the teacher's on the ranks that train.
    reference_logprobs: np.ndarray | None = None


@dataclass(slots=True)
class TokenTargets:
    """What each of N loss rows learns from. Tables that the loss does not use are None."""

    sampled_ids: torch.Tensor  # [N] int64, the response token that the row predicts
    rollout_logprobs: torch.Tensor  # [N] float32, nats; 0 where the row is not on-policy
    on_policy: torch.Tensor  # [N] bool: the student wrote the token; False: it is the dataset's
    topk_ids: torch.Tensor | None = None  # [N, K] int64, distinct in a row; -1 past a row's count
    topk_logprobs: torch.Tensor | None = None  # [N, K] float32, nats; -inf past a row's count
    tail_mass: torch.Tensor | None = None  # [N] float32, the teacher's probability outside the list
    sampled_logprobs: torch.Tensor | None = None  # [N] float32, nats, the teacher's for sampled_ids
    logits: torch.Tensor | None = None  # [N, V] the teacher's, divided by the temperature; stays on the host
    hidden: torch.Tensor | None = None  # [N, D] the teacher's final hidden states; stays on the host
    reference_logprobs: torch.Tensor | None = None  # [N] float32, nats, the reference's for sampled_ids

    def __len__(self) -> int:
        return int(self.sampled_ids.numel())

    def rows(self, rows: slice) -> TokenTargets:
        """Some of the rows; views."""
        return self._each(lambda name, table: table[rows])

    def on(self, device: torch.device) -> TokenTargets:
        """All rows on `device`, but for `logits` and `hidden`: those go there in parts."""
        return self._each(lambda name, table: table if name in ("logits", "hidden") else table.to(device))

    def _each(self, change: Callable[[str, torch.Tensor], torch.Tensor]) -> TokenTargets:
        changed: dict[str, Any] = {}
        for item in fields(self):
            table: torch.Tensor | None = getattr(self, item.name)
            changed[item.name] = None if table is None else change(item.name, table)
        return TokenTargets(**changed)


@dataclass(slots=True)
class MicroBatch:
    """One forward pass; the loss rows are a flat list, so nothing is padded to [B, S, K].

    Padded: B sequences, each filled up on the right to S tokens. Packed ("thd"): B = 1, and the sequences stand one
    after the other in that row; attention and positions begin anew at each of `cu_seqlens`.

    Logits at position t predict token t + 1, so the row of `loss_index` for response token j of a
    sequence with P prompt tokens is position P - 1 + j: exactly R rows a sequence, the
    end-of-sequence token included, nothing after it.
    """

    tokens: torch.Tensor  # [B, S] int64
    position_ids: torch.Tensor  # [B, S] int64, counted from 0 in each sequence
    loss_index: torch.Tensor  # [N] int64, into the flattened [B * S] positions
    targets: TokenTargets | None  # of the N rows; None on ranks that compute no loss
    samples: tuple[tuple[int, int], ...] = ()  # (sample_index, rows) of the sequences, in the order of their rows
    # [n_sequences + 1] int32, packed only: sequence i is columns cu_seqlens[i] to cu_seqlens[i + 1]; from 0 to S.
    cu_seqlens: torch.Tensor | None = None

    @property
    def n_loss_tokens(self) -> int:
        return int(self.loss_index.numel())
