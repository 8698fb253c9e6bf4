"""Choose the prompts of each step of a stream so that no sequence exceeds the staleness bound."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence


class StreamScheduler:
    """Which prompts of a stream are being answered, which are finished, and which a step takes.

    Each prompt is known by its position in the sampler's order; one that version v may have begun to answer is due in
    step v + max_staleness. A step takes what finished first, but no less of what is due than it must: for every later
    step, what is due by then must fit into the steps up to it. It waits for those, so nothing ever gets too old and
    nothing is thrown away. That always works out: no more prompts are under way than max_staleness + 1 steps take, so
    at first they fit; what a step begins is due last of all; and each step leaves the rest so that it fits.

    Args:
        positions: of a step, by its number: what the student answers of the batch in the sampler's order that has this
            number. The step takes as many, though not the same ones.
        total_steps: of the whole run; what comes after is not begun.
        next_batch: the first batch whose positions have not been begun.
    """

    def __init__(
        self, positions: Callable[[int], Sequence[int]], max_staleness: int, total_steps: int, next_batch: int = 0
    ) -> None:
        self._positions, self._max_staleness, self._total_steps = positions, max_staleness, total_steps
        self.next_batch = next_batch
        self._written_by: dict[int, int] = {}  # oldest version that may have written a part; in order of admission
        self._finished: dict[int, None] = {}  # in order of finishing

    def begin(self, version: int) -> list[int]:
        """The positions that may be answered under this version of the weights, and have not been begun: they are."""
        stop = max(self.next_batch, min(version + self._max_staleness + 1, self._total_steps))
        begun = [position for batch in range(self.next_batch, stop) for position in self._positions(batch)]
        self.next_batch = stop
        self.admit(begun, version)
        return begun

    def admit(self, positions: Iterable[int], version: int) -> None:
        """These are being answered, by this version or later ones."""
        self._written_by |= dict.fromkeys(positions, version)

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
        """The positions that this step takes; None: some that it needs are not finished."""
        size = len(self._positions(step))
        if len(self._finished) < size:
            return None
        chosen: dict[int, None] = {}
        room = 0  # of the steps after this one, up to `last`
        for last in range(step, step + self._max_staleness + 1):
            room += len(self._positions(last)) if last > step else 0
            due = {position for position, version in self._written_by.items() if version + self._max_staleness <= last}
            left_over = len(due) - room - len(due & chosen.keys())
            finished = [position for position in self._finished if position in due and position not in chosen]
            if len(finished) < left_over:
                return None
            chosen |= dict.fromkeys(finished[: max(left_over, 0)])
        others = [position for position in self._finished if position not in chosen]
        return [*chosen, *others[: size - len(chosen)]]

    def trained(self, positions: Iterable[int]) -> None:
        for position in positions:
            del self._written_by[position], self._finished[position]

    @property
    def unfinished(self) -> list[int]:
        """Admitted, but not finished; ascending."""
        return sorted(self._written_by.keys() - self._finished.keys())
