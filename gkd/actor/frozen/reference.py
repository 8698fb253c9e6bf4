"""Compute the logprob of each own token on one rank, of the reference or of the student.

The reference is a frozen model of its own, or the student with its LoRA adapters disabled. Data flow of a batch:
teacher scores -> *reference logprobs* -> micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import numpy as np
import torch

from gkd.actor.common.agree import same_error
from gkd.actor.common.base import Student
from gkd.actor.frozen.model import FrozenModel
from gkd.config.schema import Config
from gkd.data.batching import check_batch, make_micro_batches
from gkd.types import Rollout
from teacher_server.engines.base import ScoreParams


def frozen_reference(config: Config, device: torch.device) -> FrozenModel:
    """Build the reference model. Collective. Raises as `FrozenModel`."""
    actor = config.actor
    derived = config.derived
    return FrozenModel(
        derived.reference_folder,
        device=device,
        dtype=getattr(torch, config.model.dtype),
        key="reference.path" if config.reference.path else "model.path",
        cpu_offload=config.reference.fsdp_cpu_offload,
        packing=actor.packing,
        max_batch_tokens=actor.max_tokens_per_micro_batch or actor.micro_batch_size * derived.max_sequence_length,
        trust_remote_code=config.model.trust_remote_code,
    )


def frozen_logprobs(
    model: FrozenModel, rollouts: Sequence[Rollout], *, temperature: float, n_vocab: int
) -> list[np.ndarray]:
    """Return the logprobs of each sequence's own tokens, [M] float32, nats. Collective.

    Args:
        rollouts: of this rank; may be empty.
        n_vocab: vocabulary size of the student; the model's other logits are dropped before the softmax.

    Raises:
        TeacherError: see `FrozenModel.score`.
    """
    params = ScoreParams("sampled", temperature=temperature, n_vocab=n_vocab)
    return [cast(np.ndarray, table) for (table,) in model.score(rollouts, [params])]


def student_logprobs(
    student: Student,
    config: Config,
    rollouts: Sequence[Rollout],
    *,
    disable_adapter: bool,
    device: torch.device,
    where: str,
) -> list[np.ndarray]:
    """Return the same logprobs, of the student. Collective.

    Args:
        rollouts: of this rank's data-parallel group; may be empty.
        disable_adapter: of the student without its adapters: the base model.
        where: the rank's name, for errors.

    Raises:
        DataError: a sequence is invalid, see `check_batch`; on all ranks.
    """
    actor = config.actor
    with same_error(device):
        check_batch(rollouts, None, where=where, n_vocab=student.n_vocab, signals=())
    batches = make_micro_batches(
        [replace(rollout, sample_index=i) for i, rollout in enumerate(rollouts)],
        None,
        micro_batch_size=actor.micro_batch_size,
        max_tokens=actor.max_tokens_per_micro_batch,
        packed=actor.packing,
    )
    tables = student.compute_logprobs(batches, disable_adapter=disable_adapter)
    indices, n_rows = [index for index, _ in batches.samples], [n for _, n in batches.samples]
    if not indices:
        return []
    rows = np.split(torch.cat(tables).numpy(), np.cumsum(n_rows)[:-1])
    return [rows[i] for i in np.argsort(indices)]
