"""The source of the loop's batches: its Protocol, and the choice by `trainer.scheduler` and `trainer.replay`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from gkd.config.schedulers import STREAM
from gkd.config.schema import Config
from gkd.data.sampler import make_sampler
from gkd.handles import InFlight, PendingScores
from gkd.pipeline.generate import Generation
from gkd.pipeline.prefetch import PrefetchedBatches
from gkd.pipeline.replay import ReplayedBatches
from gkd.pipeline.streaming import StreamedBatches
from gkd.roles import Roles
from gkd.run.checkpoints import TrainerState
from gkd.types import Prompt


class BatchSource(Protocol):
    """One batch per step; each is in flight until it has been trained on."""

    @property
    def max_staleness(self) -> int | None:
        """The scheduler's bound, in steps; None for replays, whose batches are as old as they were recorded."""
        ...

    @property
    def generates(self) -> bool:
        """True if batches need the rollout engines; False for replays."""
        ...

    @property
    def is_streaming(self) -> bool:
        """True if the engines keep generating between two calls."""
        ...

    def restore(self, folder: Path, state: TrainerState) -> None:
        """Restore what was in flight at a checkpoint; call it before the first batch.

        Args:
            folder: files of the rollouts in flight; absent if there were none.
        """
        ...

    def prefetch(self, step: int) -> None:
        """Start all rollouts that may start now that the engines hold the weights of `step`; returns at once."""
        ...

    def early_part(self, step: int) -> list[PendingScores]:
        """Return the next part of this step's batch, if training on it need not wait for the rest; else nothing.

        Waits until there is one, or the rest has finished. Raises ClusterError.
        """
        ...

    def next_batch(self, step: int) -> list[PendingScores]:
        """Wait for the rollouts of this step's batch; the teacher is already scoring them. Raises ClusterError.

        Returns:
            All but the parts that `early_part` has returned.
        """
        ...

    def commit(self) -> None:
        """Record that the batch of the last `next_batch`, with its early parts, has been trained on."""
        ...

    def wait_until_idle(self) -> None:
        """Block until the engines can receive new weights; a stream returns at once. Raises ClusterError."""
        ...

    def in_flight(self, step: int) -> InFlight:
        """Return what a run that resumes from `step` could not generate again identically."""
        ...

    def close(self, *, wait: bool) -> None:
        """Start no more rollouts. May be called twice.

        Args:
            wait: also stop the running ones, and wait until they have stopped. Raises ClusterError.
        """
        ...


def make_source(config: Config, roles: Roles, prompts: Sequence[Prompt], total_steps: int) -> BatchSource:
    """Return the source that `trainer.replay` or else `trainer.scheduler` selects."""
    if config.trainer.replay:
        return ReplayedBatches(config, roles.scoring)
    sampler = make_sampler(config, prompts)
    if config.trainer.scheduler == STREAM:
        return StreamedBatches(config, roles.rollout, roles.scoring, sampler, total_steps)
    generation = Generation(config, roles.rollout, roles.scoring)
    return PrefetchedBatches(config, generation, roles.scoring, sampler, total_steps)
