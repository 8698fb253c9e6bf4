"""`trainer.scheduler`: how far the rollouts may run ahead of the training, and which of them a step takes. Floor 1.

sync            a batch is answered by the newest weights, then trained on
one_step_off    the next batch is answered while this one is trained on
two_step_off    the next two: while one is trained on, one is scored and one answered
stream          no batches in the engines: prompts go in one by one, new weights arrive in the middle of a response,
                and a step takes what is finished
"""

from __future__ import annotations

from collections.abc import Iterable

from gkd.config import TrainerConfig

# Batches begun before their turn. Each is answered by one version of the weights, so this is its staleness, too.
AHEAD = {"sync": 0, "one_step_off": 1, "two_step_off": 2}
STREAM = "stream"


def staleness_bound(trainer: TrainerConfig) -> int:
    """No sequence is trained on whose oldest part was written more than this many steps before."""
    return AHEAD.get(trainer.scheduler, trainer.max_staleness)


class StreamLedger:
    """Which prompts of a stream are being answered, which are finished, and which a step takes.

    Each prompt is known by its position in the sampler's order; one that version v may have begun to answer is due in
    step v + max_staleness. A step takes what finished first, but no less of what is due than it must: for every later
    step, what is due by then must fit into the batches up to it. It waits for those, so nothing ever gets too old and
    nothing is thrown away. That always works out: no more than max_staleness + 1 batches are under way at once, so
    at first they fit; what a step begins is due last of all; and each step leaves the rest so that it fits.

    Args:
        batch_size: prompts a step.
        total: prompts of the whole run; later ones are not admitted.
        position: prompts admitted so far.
    """

    def __init__(self, batch_size: int, max_staleness: int, total: int, position: int = 0) -> None:
        self._batch_size, self._max_staleness, self._total = batch_size, max_staleness, total
        self.position = position
        self._written_by: dict[int, int] = {}  # oldest version that may have written a part; in order of admission
        self._finished: dict[int, None] = {}  # in order of finishing

    def room(self, version: int) -> range:
        """The positions that may be admitted under this version of the weights, and are not yet."""
        limit = min((version + self._max_staleness + 1) * self._batch_size, self._total)
        return range(self.position, max(limit, self.position))

    def admit(self, positions: Iterable[int], version: int) -> None:
        """These are being answered, by this version or later ones."""
        for position in positions:
            self._written_by[position] = version
            self.position = max(self.position, position + 1)

    def finish(self, position: int, version: int) -> None:
        """All its samples are finished. Raises KeyError: it is not being answered.

        Args:
            version: the oldest that wrote a part of them.
        """
        if position in self._finished:
            raise KeyError(position)
        self._written_by[position] = max(self._written_by[position], version)
        self._finished[position] = None

    def choose(self, step: int) -> list[int] | None:
        """The positions of this step's batch; None: some that it needs are not finished."""
        if len(self._finished) < self._batch_size:
            return None
        chosen: dict[int, None] = {}
        for last in range(step, step + self._max_staleness + 1):
            # Of all that must be trained on in step `last` or before, the later steps up to it can take this many.
            due = {position for position, version in self._written_by.items() if version + self._max_staleness <= last}
            left_over = len(due) - (last - step) * self._batch_size - len(due & chosen.keys())
            finished = [position for position in self._finished if position in due and position not in chosen]
            if len(finished) < left_over:
                return None
            chosen |= dict.fromkeys(finished[: max(left_over, 0)])
        others = [position for position in self._finished if position not in chosen]
        return [*chosen, *others[: self._batch_size - len(chosen)]]

    def trained(self, positions: Iterable[int]) -> None:
        for position in positions:
            del self._written_by[position], self._finished[position]

    @property
    def unfinished(self) -> list[int]:
        """Admitted, but not finished; ascending."""
        return sorted(self._written_by.keys() - self._finished.keys())
