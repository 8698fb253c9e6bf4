"""The things that travel along the road of one batch.

    Prompt -> Rollout (+ TeacherTopK) -> MicroBatch

Everything up to `TeacherTopK` is numpy, because it crosses process borders through shared
memory and raw network frames; `MicroBatch` is torch, because it is what a rank trains on.

Shape letters, here and everywhere: P prompt tokens, R response tokens, K top-k entries,
B sequences of a micro-batch, S padded sequence length, N loss tokens of a micro-batch, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row of a prompt file, tokenized."""

    prompt_id: int  # row number over all files; stable between runs, so a resume can name it
    token_ids: np.ndarray  # [P] int32
    answer: str | None = None  # reference answer, for evaluation only


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Response tokens [start, stop) were written by the student of `policy_version`."""

    start: int
    stop: int
    policy_version: int


@dataclass(frozen=True, slots=True)
class Rollout:
    """A prompt and the student's answer to it, with the logprobs the engine sampled it under."""

    prompt_id: int
    sample_index: int  # unique in its batch: place of the prompt there x `rollout.n` + which of its samples
    prompt_ids: np.ndarray  # [P] int32
    response_ids: np.ndarray  # [R] int32; ends with the end-of-sequence token if finish_reason == "stop"
    rollout_logprobs: np.ndarray  # [R] float32, nats, of the engine's sampling distribution
    version_spans: tuple[VersionSpan, ...]
    finish_reason: str  # "stop" | "length"

    @property
    def policy_version(self) -> int:
        """The oldest version that wrote a part of it: the one staleness is measured against."""
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


@dataclass(slots=True)
class MicroBatch:
    """One forward pass. Right-padded tokens; the loss rows are a flat list, so nothing is padded to [B, S, K].

    Logits at position t predict token t + 1, so the row of `loss_index` for response token j of a
    sequence with P prompt tokens is position P - 1 + j: exactly R rows a sequence, the
    end-of-sequence token included, nothing after it.
    """

    tokens: torch.Tensor  # [B, S] int64
    position_ids: torch.Tensor  # [B, S] int64
    loss_index: torch.Tensor  # [N] int64, into the flattened [B * S] positions
    target_ids: torch.Tensor  # [N] int64, the sampled response token each row predicts
    topk_ids: torch.Tensor  # [N, K] int64
    topk_logprobs: torch.Tensor  # [N, K] float32, nats

    @property
    def n_loss_tokens(self) -> int:
        return int(self.loss_index.numel())
