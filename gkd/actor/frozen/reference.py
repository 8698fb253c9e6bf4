"""One rank of the reference: rollouts in, the reference's logprob of each response token out.

Two ways to it: a frozen model of its own beside the student, or a student with adapters, without them. On the road of
one batch: teacher score -> *reference* -> micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import numpy as np
import torch

from gkd.actor.common.agree import same_error
from gkd.actor.frozen.model import FrozenModel
from gkd.actor.fsdp.student import FsdpStudent
from gkd.config.derived import derive
from gkd.config.schema import Config
from gkd.data.batching import check_batch, make_micro_batches
from gkd.types import Rollout
from teacher_server.engines.base import ScoreParams


def frozen_reference(config: Config, device: torch.device) -> FrozenModel:
    """The model of `reference_folder`; a collective over all ranks. Raises ModelError, ConfigError: see there."""
    actor = config.actor
    derived = derive(config)
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
    """Of each sequence [R] float32, nats; a collective over all ranks.

    Args:
        rollouts: of this rank; may be none.
        n_vocab: the student's; the model's other rows are cut before it normalises.

    Raises:
        TeacherError: see `FrozenModel.score`.
    """
    asked = ScoreParams("sampled", temperature=temperature, n_vocab=n_vocab)
    return [cast(np.ndarray, table) for (table,) in model.score(rollouts, [asked])]


def bare_logprobs(
    student: FsdpStudent, config: Config, rollouts: Sequence[Rollout], *, device: torch.device, where: str
) -> list[np.ndarray]:
    """The same of the student without its adapters, that is, of the model that they began at.

    Args:
        where: names the rank in errors.

    Raises:
        DataError: what `check_batch` finds, on all ranks.
    """
    actor = config.actor
    with same_error(device):
        check_batch(rollouts, None, where=where, n_vocab=student.n_vocab, wanted=())
    batches = make_micro_batches(
        [replace(rollout, sample_index=i) for i, rollout in enumerate(rollouts)],
        None,
        micro_batch_size=actor.micro_batch_size,
        max_tokens=actor.max_tokens_per_micro_batch,
        packed=actor.packing,
    )
    tables = student.compute_logprobs(batches, disable_adapter=True)
    places, n_rows = [place for place, _ in batches.samples], [n for _, n in batches.samples]
    if not places:
        return []
    rows = np.split(torch.cat(tables).numpy(), np.cumsum(n_rows)[:-1])
    return [rows[i] for i in np.argsort(places)]
