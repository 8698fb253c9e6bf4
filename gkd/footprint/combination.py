"""Search for the cheapest combination of settings with which a run fits into its GPUs and its host.

The rows of `gkd.memory.remedies` are applied in the order of the table; a row may repeat. Combinations are tried by
their guessed slowdown, smallest first, and the search ends at the first one that fits: whatever is a part of it was
tried before, and does not fit. Each has to pass `check_config`, and the models have to allow it. A row is tried only
while a phase in which it helps does not fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import count

from gkd.config.check import check_config
from gkd.config.schema import Config
from gkd.errors import ConfigError, ModelError
from gkd.footprint.limits import actor_peak, shortages
from gkd.footprint.rank import GENERATE, WEIGHT_SYNC, RankFootprint
from gkd.memory import remedies
from gkd.memory.remedies import ACTOR_REMEDIES, ENGINE_REMEDIES, ENGINE_TP
from gkd.memory.remedy import Changes, Remedy, as_yaml, with_changes

Refit = Callable[[Config], Sequence[RankFootprint]]  # the footprints of changed settings, as `footprint` returns them
Lacks = Callable[[Config, Sequence[RankFootprint]], int]
HOST = ("host", "all")

# Rows and their phase by what is short: (role, need) of `shortages`.
_ROWS: dict[tuple[str, str], tuple[tuple[Remedy, ...], str]] = {
    ("actor", "training_step"): (ACTOR_REMEDIES, remedies.STEP),
    ("actor", "optimizer_step"): (ACTOR_REMEDIES, "optimizer step"),
    ("actor", WEIGHT_SYNC): ((*ACTOR_REMEDIES, ENGINE_TP), remedies.SENDING),
    ("actor", "teacher_pass"): (ACTOR_REMEDIES, remedies.TEACHER),
    ("actor", "reference_pass"): (ACTOR_REMEDIES, remedies.REFERENCE),
    ("actor", GENERATE): (ENGINE_REMEDIES, remedies.GENERATING),
    ("rollout", "all"): (ENGINE_REMEDIES, remedies.GENERATING),
    ("rollout", "sequence"): (ENGINE_REMEDIES, remedies.CACHE),
    ("rollout", "sync"): (ENGINE_REMEDIES, remedies.RECEIVING),
}


@dataclass(frozen=True, slots=True)
class Step:
    """The settings after a change, and what they need."""

    changes: Changes  # empty: the settings as given
    config: Config
    footprints: Sequence[RankFootprint]
    peak_bytes: int  # on the actor's fullest GPU
    short: Mapping[tuple[str, str], int]  # missing bytes by need, see `shortages`, and of `HOST`

    @property
    def short_bytes(self) -> int:
        """The largest lack, memory.margin included; 0 or less: everything fits."""
        return max(self.short.values())


@dataclass(frozen=True, slots=True)
class Combination:
    """The result: the cheapest combination that fits, or the one that is nearest to it."""

    steps: tuple[Step, ...]  # the settings as given, then one per change
    more_gpus: tuple[Step, ...] = ()  # further changes, with more GPUs, if nothing fits without

    @property
    def fits(self) -> bool:
        """Return whether the last of `steps` fits, with memory.margin."""
        return self.steps[-1].short_bytes <= 0

    @property
    def overrides(self) -> list[str]:
        """Return all changes as `key=value`, as `load_config` takes them; with `more_gpus`, too."""
        changes = {key: value for step in (*self.steps, *self.more_gpus) for key, value in step.changes.items()}
        return [f"{key}={as_yaml(value)}" for key, value in changes.items()]


def find_combination(config: Config, refit: Refit, gpu_bytes: int, lacks_host: Lacks | None = None) -> Combination:
    """Return the cheapest combination that fits on the GPUs of these settings, or the one that is nearest to it.

    Takes less than a second for most settings.

    Args:
        refit: returns the footprints of changed settings, without a teacher server's.
        gpu_bytes: memory of each GPU.
        lacks_host: returns the missing bytes of the fullest host; None: its size is unknown.

    Raises:
        ConfigError, ModelError: the settings as given are not valid.
    """

    def measure(changes: Changes, changed: Config) -> Step:
        check_config(changed)
        found = refit(changed)
        short = shortages(found, gpu_bytes, changed)
        if lacks_host is not None:
            short[HOST] = lacks_host(changed, found)
        return Step(changes, changed, found, actor_peak(found, gpu_bytes, changed), short)

    rows = [row for row in (*ACTOR_REMEDIES, *ENGINE_REMEDIES) if row.is_tried]
    here = _by_pool([measure({}, config)], [row for row in rows if not row.adds_gpus], measure)
    found = Combination(tuple(here))
    if found.fits:
        return found
    more = _by_pool(here[-1:], [row for row in rows if row.adds_gpus], measure)
    return Combination(found.steps, tuple(more[1:]) if more[-1].short_bytes <= 0 else ())


_Measure = Callable[[Changes, Config], Step]


def _by_pool(steps: Sequence[Step], rows: Sequence[Remedy], measure: _Measure) -> list[Step]:
    """Return the steps and those of the combinations that are found from there; pools of their own one by one."""
    found = list(steps)
    for roles in [("actor", "rollout")] if found[0].config.trainer.colocate else [("actor",), ("rollout",)]:
        found += _search(found[-1], roles, rows, measure)
    return found


def _search(start: Step, roles: Sequence[str], rows: Sequence[Remedy], measure: _Measure) -> tuple[Step, ...]:
    """Return the steps of the cheapest combination with which all needs of these roles fit, or of the nearest one."""
    path: tuple[Step, ...] = (start,)
    nearest, least, order = path, _lack(start, roles), count()
    # By slowdown: the steps so far, the row that comes next, and how often it was applied.
    heap: list[tuple[float, int, tuple[Step, ...], int, int]] = []
    last, repeats, slowdown = 0, -1, 0.0
    while least > 0:
        for index, row in _helpful(rows, last, path[-1], roles):
            again = repeats + 1 if index == last else 0
            heappush(heap, (slowdown + row.slowdown * 2**again, next(order), path, index, again))
        reached = None
        while heap and reached is None:
            slowdown, _, before, last, repeats = heappop(heap)
            reached = _applied(rows[last], before, measure, again=repeats > 0)
        if reached is None:
            break
        path = reached
        if (lack := _lack(path[-1], roles)) < least:
            nearest, least = path, lack
    return nearest[1:]


def _applied(row: Remedy, path: tuple[Step, ...], measure: _Measure, *, again: bool) -> tuple[Step, ...] | None:
    """Return the path with the row's change; None: this model or these pools do not allow it.

    Args:
        again: the last step applied the same row: the two become one step.
    """
    config = path[-1].config
    changes = row.next(config)
    try:
        step = measure(changes, with_changes(config, changes))
    except (ConfigError, ModelError):
        return None
    if again:
        return (*path[:-1], replace(step, changes={**path[-1].changes, **step.changes}))
    return (*path, step)


def _helpful(rows: Sequence[Remedy], first: int, now: Step, roles: Sequence[str]) -> Iterator[tuple[int, Remedy]]:
    """Yield the rows from `first` on that apply to the settings and help in a phase that does not fit."""
    on_cuda = now.config.trainer.device != "cpu"
    lacking = [_ROWS[need] for need, lack in now.short.items() if lack > 0 and need[0] in roles]
    for index, row in enumerate(rows[first:], first):
        if any(row in table and row.helps(now.config, phase, on_cuda=on_cuda) for table, phase in lacking):
            yield index, row


def _lack(step: Step, roles: Sequence[str]) -> int:
    return max(lack for need, lack in step.short.items() if need[0] in roles or need == HOST)
