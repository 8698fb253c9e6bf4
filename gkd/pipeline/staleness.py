"""Bound the staleness of rollouts: check a batch, and choose the prompts of each step of a stream."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from gkd.errors import NumericsError
from gkd.handles import ScoredChunk


def check_staleness(batch: Sequence[ScoredChunk], step: int, bound: int | None, scheduler: str) -> None:
    """Check that no rollout of a batch is older than the scheduler allows.

    Args:
        step: version of the weights that train on the batch.
        bound: in steps; None: not checked.

    Raises NumericsError: one is older.
    """
    oldest = min((c.rollouts.policy_version for c in batch if c.rollouts.on_policy), default=step)
    if bound is not None and step - oldest > bound:
        raise NumericsError(
            f"trainer.scheduler = {scheduler}: staleness is at most {bound}, but step {step} got a rollout that is "
            f"{step - oldest} steps old. The batch was not trained on."
        )


class StreamScheduler:
    """Track the prompts of a stream and select those of the next step.

    A prompt is identified by its position in the sampler's order. If generation may have started with weights of
    version v, the prompt's deadline is step v + max_staleness. A step takes the prompts that finished first, but always
    includes as many early-deadline prompts as necessary: for every later step t, all prompts due by t must fit into the
    steps up to t. The step waits for these. So no sequence exceeds the bound, and none is discarded.

    A valid selection always exists: at most max_staleness + 1 steps' worth of prompts are in flight, so they fit at the
    start; newly admitted prompts have the latest deadline; and every step leaves a set that fits.

    Args:
        positions: batch number -> positions of the on-policy prompts in that batch of the sampler's order. A step takes
            as many prompts as its batch has, though not the same ones.
        total_steps: of the whole run; batches after it are never admitted.
        next_batch: the first batch whose prompts have not been admitted.
    """

    def __init__(
        self, positions: Callable[[int], Sequence[int]], max_staleness: int, total_steps: int, next_batch: int = 0
    ) -> None:
        self._positions, self._max_staleness, self._total_steps = positions, max_staleness, total_steps
        self.next_batch = next_batch
        self._version: dict[int, int] = {}  # position -> oldest version that may have generated a part
        self._finished: dict[int, None] = {}  # in order of finishing

    def admit_new(self, version: int) -> list[int]:
        """Admit and return all positions that may be generated with weights of this version."""
        stop = max(self.next_batch, min(version + self._max_staleness + 1, self._total_steps))
        new = [position for batch in range(self.next_batch, stop) for position in self._positions(batch)]
        self.next_batch = stop
        self.admit(new, version)
        return new

    def admit(self, positions: Iterable[int], version: int) -> None:
        """Record that these are being generated with this version or later ones."""
        self._version |= dict.fromkeys(positions, version)

    def finish(self, position: int, version: int) -> None:
        """Record that all samples of a prompt are finished. Raises KeyError: it is not in flight.

        Args:
            version: the oldest that generated a part of them.
        """
        if position in self._finished:
            raise KeyError(position)
        self._version[position] = max(self._version[position], version)
        self._finished[position] = None

    def choose(self, step: int) -> list[int] | None:
        """Return the positions that this step takes; None: some that it needs have not finished."""
        size = len(self._positions(step))
        if len(self._finished) < size:
            return None
        chosen: dict[int, None] = {}
        room = 0  # prompts that the steps after this one, up to `last`, can take
        for last in range(step, step + self._max_staleness + 1):
            room += len(self._positions(last)) if last > step else 0
            due = {position for position, version in self._version.items() if version + self._max_staleness <= last}
            must_take = len(due) - room - len(due & chosen.keys())
            finished = [position for position in self._finished if position in due and position not in chosen]
            if len(finished) < must_take:
                return None
            chosen |= dict.fromkeys(finished[: max(must_take, 0)])
        others = [position for position in self._finished if position not in chosen]
        return [*chosen, *others[: size - len(chosen)]]

    def remove(self, positions: Iterable[int]) -> None:
        """Forget prompts that were trained on."""
        for position in positions:
            del self._version[position], self._finished[position]

    @property
    def unfinished(self) -> list[int]:
        """Positions that are admitted but not finished, ascending."""
        return sorted(self._version.keys() - self._finished.keys())
