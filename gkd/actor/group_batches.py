"""A data-parallel group's share of a batch, checked and cut into micro-batches; the same on all ranks of the group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gkd.actor.common.agree import same_error
from gkd.actor.common.base import Student
from gkd.config.schema import ActorConfig
from gkd.data.balance import select, with_references
from gkd.data.batching import check_batch, make_micro_batches
from gkd.data.collate import MicroBatches
from gkd.types import Rollout
from teacher_server.wire.protocol import Signal


def group_batches(
    takes: Sequence[bytes | None],
    lists: Sequence[list[Any]],
    student: Student,
    actor: ActorConfig,
    *,
    device: torch.device,
    where: str,
    has_scores: bool,
    signals: tuple[Signal, ...],
    with_reference: bool = False,
) -> tuple[MicroBatches, list[Rollout]]:
    """The micro-batches, and the sequences in them.

    Args:
        takes, lists: as of `ActorWorker.train_step`.
        where: the rank, for errors.
        has_scores: this rank is on the last pipeline stage, and scores are in `lists`.
        signals: that each sequence's scores must have.

    Raises:
        DataError, TeacherError: on all ranks alike, what is wrong with a sequence on any of them; see `check_batch`.
    """
    n_chunks = len(takes)
    with same_error(device):
        scored = with_references(lists[n_chunks : 2 * n_chunks], lists[2 * n_chunks :]) if has_scores else None
        rollouts, scores = select(takes, lists[:n_chunks], scored)
        check_batch(
            rollouts,
            scores,
            where=where,
            n_vocab=student.n_vocab,
            wanted=signals,
            hidden_size=student.teacher_hidden_size,
            with_reference=with_reference,
        )
        batches = make_micro_batches(
            rollouts,
            scores,
            micro_batch_size=actor.micro_batch_size,
            max_tokens=actor.max_tokens_per_micro_batch,
            packed=actor.packing,
        )
    return batches, rollouts
