"""Bound the staleness of rollouts: check a batch, and choose the prompts of each step of a stream."""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence

from gkd.errors import NumericsError
from gkd.types import ScoredChunk


def check_staleness(batch: Sequence[ScoredChunk], step: int, bound: int | None, scheduler: str) -> None:
    """Check that no rollout of a batch is older than the scheduler allows.

    Args:
        step: version of the weights that train on the batch.
        bound: in steps; None disables the check.

    Raises NumericsError: one is older.
    """
    oldest = min((int(c.rollouts.versions.min()) for c in batch if c.rollouts.on_policy), default=step)
    if bound is not None and step - oldest > bound:
        raise NumericsError(
            f"trainer.scheduler = {scheduler}: staleness is at most {bound}, but step {step} got a rollout that is "
            f"{step - oldest} steps old. The batch was not trained on."
        )


class StreamScheduler:
    """Track the prompts of a stream and select the prompts of the next step.

    A prompt is identified by its position in the sampler's order. If generation may have started with weights of
    version v, the prompt's deadline is step v + max_staleness. A step takes the prompts that finished first, but always
    includes as many early-deadline prompts as necessary: for every later step t, all prompts due by t must fit into the
    steps up to t. The step waits for these. So no sequence exceeds the bound, and none is discarded. Prompts that
    are due in the step itself are determined before they have finished, so the others need not wait for them.

    A valid selection always exists: at most max_staleness + 1 steps' worth of prompts are in flight, so they fit at the
    start; newly admitted prompts have the latest deadline; and every step leaves a set that fits.

    Args:
        positions: batch number -> positions of the on-policy prompts in that batch of the sampler's order. A step takes
            as many prompts as its batch has, though not the same ones.
        total_steps: of the whole run; batches after it are never admitted.
        next_batch: the first batch whose prompts have not been admitted.
        early_parts: a step begins with the finished part of its batch, if that is at least half of it: many passes with
            few sequences take longer than one.
    """

    def __init__(
        self,
        positions: Callable[[int], Sequence[int]],
        max_staleness: int,
        total_steps: int,
        next_batch: int = 0,
        *,
        early_parts: bool = False,
    ) -> None:
        self._early_parts = early_parts
        self._positions = positions
        self._max_staleness = max_staleness
        self._total_steps = total_steps
        self.next_batch = next_batch
        self._version: dict[int, int] = {}  # position -> oldest version that may have generated a part
        # Oldest version -> number of prompts in flight, and oldest version -> {finished position: its number}.
        self._n_of: defaultdict[int, int] = defaultdict(int)
        self._finished_of: defaultdict[int, dict[int, int]] = defaultdict(dict)
        self._n_finished = 0  # prompts in flight that have finished
        self._number = 0  # number of the next prompt that finishes: 0, 1, ... in order of finishing

    def admit_new(self, version: int) -> list[int]:
        """Admit and return all positions that may be generated with weights of this version."""
        stop = max(self.next_batch, min(version + self._max_staleness + 1, self._total_steps))
        new = [position for batch in range(self.next_batch, stop) for position in self._positions(batch)]
        self.next_batch = stop
        self.admit(new, version)
        return new

    def admit(self, positions: Iterable[int], version: int) -> None:
        """Record that these are being generated with this version or later ones. Raises KeyError: one is in flight."""
        for position in positions:
            if position in self._version:
                raise KeyError(position)
            self._version[position] = version
            self._n_of[version] += 1

    def not_started(self, positions: Iterable[int], version: int) -> None:
        """Record that these are being generated with this version or later ones; finished ones are ignored."""
        for position in positions:
            before = self._version.get(position, version)
            if before < version and position not in self._finished_of[before]:
                self._version[position] = version
                self._n_of[before] -= 1
                self._n_of[version] += 1

    def finish(self, position: int, version: int) -> None:
        """Record that all samples of a prompt are finished. Raises KeyError: it is not in flight.

        Args:
            version: the oldest that generated a part of them.
        """
        before = self._version[position]
        if position in self._finished_of[before]:
            raise KeyError(position)
        version = max(before, version)
        self._version[position] = version
        self._n_of[before] -= 1
        self._n_of[version] += 1
        self._finished_of[version][position] = self._number
        self._number += 1
        self._n_finished += 1

    def choose(self, step: int) -> tuple[list[int], list[int]] | None:
        """Return (finished positions, unfinished ones that are due) that this step takes, or None if it has to wait.

        Costs O(max_staleness) while the answer is None, and O(prompts in flight) otherwise.
        """
        takes = self._takes(step)
        if takes is None:
            return None
        chosen: list[int] = []
        heads: list[tuple[int, int, Iterator[tuple[int, int]]]] = []  # one per version: number, position, the rest
        versions = sorted(self._finished_of)
        for version, n in takes:
            while versions and versions[0] <= version:
                _push_next(heads, iter(self._finished_of[versions.pop(0)].items()))
            for _ in range(n):
                _, position, rest = heapq.heappop(heads)
                chosen.append(position)
                _push_next(heads, rest)
        if len(chosen) == len(self._positions(step)):
            return chosen, []
        newest_due = step - self._max_staleness
        due = [p for p, v in self._version.items() if v <= newest_due and p not in self._finished_of[v]]
        return chosen, due

    def split(self, positions: Sequence[int]) -> tuple[list[int], list[int]] | None:
        """Return (finished, unfinished) of these positions in flight, or None if less than half have finished."""
        halves: tuple[list[int], list[int]] = [], []
        for position in positions:
            halves[position not in self._finished_of[self._version[position]]].append(position)
        return None if len(halves[0]) < len(halves[1]) else halves

    def _takes(self, step: int) -> list[tuple[int, int]] | None:
        """Return (version, n): the step takes n more finished prompts of this version or older. None: it must wait.

        Example: step 5, max_staleness 2, 4 prompts a step; in flight are

            version 3    3 prompts, 2 finished    due in step 5
            version 4    5 prompts, 2 finished    due in step 6 at the latest
            version 5    4 prompts, 0 finished    due in step 7 at the latest

        Step 5 must take the 3 of version 3: it takes 2 now, and waits for one. Step 6 has room for 4 of the 5 prompts
        of version 4, so step 5 must take one of them. Steps 6 and 7 have room for all others. The result is
        [(3, 2), (4, 1), (5, 0)]: the last entry has the rest, which may be of any version; together with the late
        prompt they are 4.
        """
        size = len(self._positions(step))
        least = math.ceil(size / 2) if self._early_parts else size
        if self._n_finished < least:
            return None
        takes: list[tuple[int, int]] = []
        taken = 0
        n_late = 0  # prompts in `taken` that are due in this step and have not finished
        room = 0  # prompts that the steps after this one, up to `last`, can take
        for last in range(step, step + self._max_staleness + 1):
            room += len(self._positions(last)) if last > step else 0
            newest_due = last - self._max_staleness
            must_take = sum(n for version, n in self._n_of.items() if version <= newest_due) - room - taken
            if must_take <= 0:
                continue
            n_finished = sum(len(done) for version, done in self._finished_of.items() if version <= newest_due)
            if last == step:
                n_late = must_take - n_finished
            elif n_finished - (taken - n_late) < must_take:
                return None
            takes.append((newest_due, must_take - n_late if last == step else must_take))
            taken += must_take
        if self._n_finished + n_late < size or size - n_late < least:
            return None
        return [*takes, (max(self._n_of, default=step), size - taken)]

    def remove(self, positions: Iterable[int]) -> None:
        """Forget prompts that were trained on. Raises KeyError: one is not finished."""
        for position in positions:
            version = self._version[position]
            del self._finished_of[version][position], self._version[position]
            self._n_of[version] -= 1
            self._n_finished -= 1
        for version in [version for version, n in self._n_of.items() if n == 0]:
            del self._n_of[version]
            self._finished_of.pop(version, None)

    @property
    def finished(self) -> list[int]:
        """Positions that are finished but not trained on, in order of finishing."""
        numbers = {position: number for done in self._finished_of.values() for position, number in done.items()}
        return sorted(numbers, key=numbers.__getitem__)

    @property
    def unfinished(self) -> list[int]:
        """Positions that are admitted but not finished, ascending."""
        return sorted(
            position for position, version in self._version.items() if position not in self._finished_of[version]
        )


def _push_next(heads: list[tuple[int, int, Iterator[tuple[int, int]]]], rest: Iterator[tuple[int, int]]) -> None:
    """Push the next finished prompt of a version, if there is one. Numbers differ, so iterators are never compared."""
    for position, number in rest:
        heapq.heappush(heads, (number, position, rest))
        return
