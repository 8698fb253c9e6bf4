"""Coalesce finished sequences to chunks of one job and one data-parallel group."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from gkd.rollout.messages import Job
from gkd.types import Rollout

_LATE_SHARE = 1 / 8  # share of the usual time that a late chunk waits: few more chunks, even if most sequences are late


@dataclass(slots=True)
class _Growing:
    due_s: float
    rollouts: list[Rollout] = field(default_factory=list)


class Coalescer:
    """Hold finished sequences until their chunk is full or has waited long enough.

    Args:
        n_groups: data-parallel groups; a prompt's index modulo this is the group that scores it.
        size: sequences of a full chunk.
        late_age: a sequence over which the weights have changed this many times, or more often, waits for a shorter
            time, because a step may wait for it; 0: none does.
    """

    def __init__(self, n_groups: int, size: int, late_age: int = 0) -> None:
        self._n_groups, self._size, self._late_age = n_groups, size, late_age
        self._growing: dict[tuple[int, int], _Growing] = {}  # (job id, data-parallel group) -> chunk

    def add(self, job: Job, rollout: Rollout, now_s: float) -> None:
        key = job.id, rollout.sample_index // job.sampling.n % self._n_groups
        growing = self._growing.get(key)
        if growing is None:
            growing = self._growing[key] = _Growing(now_s + job.linger_s)
        if self._late_age and rollout.version_span >= self._late_age:
            growing.due_s = min(growing.due_s, now_s + _LATE_SHARE * job.linger_s)
        growing.rollouts.append(rollout)

    def due(self, now_s: float, *, flush: bool) -> Iterator[tuple[int, int, list[Rollout]]]:
        """Yield (job's id, group, sequences) of the chunks that leave now.

        Args:
            flush: all of them.
        """
        for (job, group), growing in list(self._growing.items()):
            rest = growing.rollouts
            while len(rest) >= self._size:
                yield job, group, rest[: self._size]
                rest = rest[self._size :]
            if rest and (flush or now_s >= growing.due_s):
                yield job, group, rest
                rest = []
            if rest:
                growing.rollouts = rest
            else:
                del self._growing[job, group]
