"""Where the loop's batches come from, by `trainer.scheduler` or `trainer.replay`: the Protocol, and the choice."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from gkd.handles import InFlight, PendingScores
from gkd.metrics.writer import StageTimers
from gkd.run.checkpoints import TrainerState


class BatchSource(Protocol):
    """Batches, one a step; each is in flight until it has been trained on."""

    @property
    def max_staleness(self) -> int | None:
        """The bound that it promises; None: whoever made the batches has chosen how old they are."""
        ...

    def restore(self, folder: Path, state: TrainerState) -> None:
        """Go on from a checkpoint, before the first batch.

        Args:
            folder: with the files of what was in flight; need not be there if nothing was.
        """
        ...

    def begin(self, step: int) -> None:
        """Have answered what may be begun now that the engines have the weights of `step`; returns at once."""
        ...

    def next(self, step: int) -> list[PendingScores]:
        """The batch of this step, answered; the teacher was asked about it. Raises ClusterError."""
        ...

    def trained(self) -> None:
        """The batch that `next` returned has been trained on."""
        ...

    def settle(self, timers: StageTimers) -> None:
        """Block until the engines may be given new weights. Raises ClusterError."""
        ...

    def in_flight(self, step: int) -> InFlight:
        """At a checkpoint of `step` optimizer steps: what a run that goes on from there could not make itself."""
        ...

    def close(self, *, wait: bool) -> None:
        """Begin nothing more. Calling it again is harmless.

        Args:
            wait: stop what is being answered, too, and wait until it has stopped. Raises ClusterError.
        """
        ...
