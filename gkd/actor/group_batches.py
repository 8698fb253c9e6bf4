"""Build a data-parallel group's micro-batches from its parts of a batch; the same on all ranks of the group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any

import numpy as np
import torch

from gkd.actor.common.agree import same_error
from gkd.actor.common.base import Student
from gkd.config.schema import ActorConfig
from gkd.data.batching import check_batch, make_micro_batches, without_first
from gkd.data.collate import MicroBatches
from gkd.data.scatter import select, with_advantages
from gkd.errors import DataError
from gkd.types import Rollout, TeacherScores
from teacher_server.wire.protocol import Signal


def group_batches(
    sequence_indices: Sequence[bytes | None],
    lists: Sequence[list[Any]],
    student: Student,
    actor: ActorConfig,
    *,
    device: torch.device,
    where: str,
    has_scores: bool,
    signals: tuple[Signal, ...],
    with_reference: bool = False,
    advantages: Sequence[bytes] | None = None,
    skip_first: int = 0,
) -> tuple[MicroBatches, list[Rollout]]:
    """Return the group's micro-batches, and the sequences in them.

    Args:
        sequence_indices, lists, advantages: see `ActorWorker.train_step`.
        where: the rank's name, for errors.
        has_scores: this rank is on the last pipeline stage, and `lists` include scores.
        signals: required of each sequence's scores.
        skip_first: tokens of each response that carry no loss; a sequence without others is left out.

    Raises:
        DataError, TeacherError: a sequence of some rank is invalid, see `check_batch`; the same error on all ranks.
    """
    n_chunks = len(sequence_indices)
    with same_error(device):
        scored = add_references(lists[n_chunks : 2 * n_chunks], lists[2 * n_chunks :]) if has_scores else None
        rollouts, scores = select(sequence_indices, lists[:n_chunks], scored)
        if advantages is not None:
            rollouts = with_advantages(rollouts, advantages)
        check_batch(
            rollouts,
            scores,
            where=where,
            n_vocab=student.n_vocab,
            signals=signals,
            hidden_size=student.teacher_hidden_size,
            with_reference=with_reference,
        )
        rollouts, scores = without_first(rollouts, scores, skip_first)
        batches = make_micro_batches(
            rollouts,
            scores,
            micro_batch_size=actor.micro_batch_size,
            max_tokens=actor.max_tokens_per_micro_batch,
            packed=actor.packing,
        )
    return batches, rollouts


def add_references(
    scores: Sequence[list[TeacherScores]], references: Sequence[list[np.ndarray | None]]
) -> Sequence[list[TeacherScores]]:
    """Return the scores of each chunk with the reference logprobs of the same sequences.

    Args:
        references: by chunk, [R] float32 for each sequence, or None for one that is not trained on; those at the end
            may be left out. Empty means there is no reference.

    Raises:
        DataError: a chunk has more reference logprobs than scores.
    """
    if not references:
        return scores
    sizes = [len(chunk) for chunk in scores], [len(chunk) for chunk in references]
    if any(n < m for n, m in zip(*sizes, strict=True)):
        raise DataError(f"chunks of {sizes[0]} scored sequences have reference logprobs of {sizes[1]}")
    return [
        [replace(score, reference_logprobs=logprobs) for score, logprobs in zip_longest(scored, chunk)]
        for scored, chunk in zip(scores, references, strict=True)
    ]
