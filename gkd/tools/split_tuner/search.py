"""Rank all splits of the GPUs under the given schedulers: a closed form preselects, the simulation decides."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from gkd.config.check import check_config
from gkd.config.schema import Config
from gkd.errors import ConfigError
from gkd.tools.split_tuner import layout
from gkd.tools.split_tuner.estimate import estimate
from gkd.tools.split_tuner.layout import Hardware, Split
from gkd.tools.split_tuner.outcome import Outcome
from gkd.tools.split_tuner.rates import Rates, Workload, max_staleness
from gkd.tools.split_tuner.simulate import simulate

_MAX_SIMULATED = 60  # per scheduler, of splits that fit into memory
_MIN_SIMULATED = 4
_TOO_LARGE = 4  # simulated splits that do not fit, to show what prevents them
_BUDGET_S = 30.0  # per scheduler, beyond the minimum
_LOOKED_AT = 20_000  # splits of a scheduler that are checked to find the minimum; about 0.5 ms each

# Returns why a run with these settings does not fit into the GPUs, one sentence each; empty: it fits.
CheckMemory = Callable[[Config], Sequence[str]]
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Candidate:
    split: Split
    scheduler: str
    outcome: Outcome
    too_large: tuple[str, ...] | None  # why it does not fit into memory; None: not checked

    @property
    def fits(self) -> bool:
        return not self.too_large


@dataclass(frozen=True, slots=True)
class Refused:
    """Splits that the checks of the settings refuse, all under one scheduler and for one key."""

    scheduler: str
    n: int
    first: ConfigError  # of the first one


@dataclass(frozen=True, slots=True)
class Ranking:
    candidates: tuple[Candidate, ...]  # fitting ones first, then by step time
    n_splits: int  # per scheduler
    n_simulated: int
    n_looked_at: int = 0  # checked, under all schedulers
    n_too_large: int = 0  # of these; only a few are candidates
    refused: tuple[Refused, ...] = ()


def search(
    config: Config,
    hardware: Hardware,
    schedulers: Sequence[str],
    workload: Workload,
    rates: Rates,
    *,
    check_memory: CheckMemory | None,
    seed: int = 0,
    progress: Progress = lambda text: None,
) -> Ranking:
    """Simulate the best splits by the closed form; all of them if there are few.

    Of the splits that do not fit into memory a few are simulated in addition, and the others are counted.

    Raises:
        ConfigError: there is no split of this many GPUs, or the checks of the settings refuse all of them.
    """
    splits = list(layout.splits(config, hardware))
    if not splits:
        a, worker = config.actor, 0 if hardware.workers_elsewhere else hardware.gpus_per_worker
        problem = (
            f"no split has actor.tp {a.tp} x actor.pp {a.pp} GPUs for the actor (with actor.ep {a.ep}: "
            f"{layout.actor_unit(config)}), rollout.tp {config.rollout.tp} for an engine and {worker} for the teacher, "
            f"on nodes of {hardware.per_node}."
        )
        raise ConfigError("--gpus", hardware.n_gpus, problem, "use more GPUs, or smaller parallel sizes.")
    units = np.array([[s.actor.n_gpus, s.rollout.n_gpus, s.workers] for s in splits], float)
    dp, engines = units[:, 0] / (config.actor.tp * config.actor.pp), units[:, 1] / config.rollout.tp
    found = _Found()
    for scheduler in schedulers:
        bound = max_staleness(config, scheduler)
        estimated = estimate(scheduler, dp, engines, units[:, 2], workload, rates, bound)
        began, n_fit, n_shown = time.monotonic(), 0, 0
        for n_looked_at, i in enumerate(np.argsort(estimated, kind="stable").tolist()):
            late = time.monotonic() - began > _BUDGET_S and (n_fit >= _MIN_SIMULATED or n_looked_at >= _LOOKED_AT)
            if n_fit == _MAX_SIMULATED or late:
                break
            found.n_looked_at += 1
            try:
                changed, too_large = _checked(config, splits[i], scheduler, check_memory)
            except ConfigError as error:
                found.refuse(scheduler, error)
                continue
            if too_large:
                found.n_too_large += 1
                if n_shown == _TOO_LARGE:
                    continue
                n_shown += 1
            else:
                n_fit += 1
            outcome = _outcome(changed, splits[i], workload, rates, seed)
            found.candidates.append(Candidate(splits[i], scheduler, outcome, too_large))
            progress(f"{scheduler}: {n_fit + n_shown} of {min(_MAX_SIMULATED, len(splits))} splits simulated")
    return found.ranking(len(splits), hardware.n_gpus)


def simulated(
    config: Config,
    split: Split,
    scheduler: str,
    workload: Workload,
    rates: Rates,
    check_memory: CheckMemory | None,
    seed: int,
) -> Candidate:
    """Simulate one split. Raises ConfigError: the checks of the settings refuse it with this scheduler."""
    changed, too_large = _checked(config, split, scheduler, check_memory)
    return Candidate(split, scheduler, _outcome(changed, split, workload, rates, seed), too_large)


@dataclass(slots=True)
class _Found:
    """Intermediate results of a search."""

    candidates: list[Candidate] = field(default_factory=list)
    n_looked_at: int = 0
    n_too_large: int = 0
    refused: dict[tuple[str, str], Refused] = field(default_factory=dict)  # by scheduler and key

    def refuse(self, scheduler: str, error: ConfigError) -> None:
        before = self.refused.get((scheduler, error.key), Refused(scheduler, 0, error))
        self.refused[scheduler, error.key] = replace(before, n=before.n + 1)

    def ranking(self, n_splits: int, n_gpus: int) -> Ranking:
        """Return the ranking. Raises ConfigError: all splits were refused."""
        refused = tuple(self.refused.values())
        if not self.candidates:
            first = refused[0].first
            problem = f"none of the {n_splits} splits of {n_gpus} GPUs is allowed: {first.problem}"
            raise ConfigError(first.key, first.value, problem, first.fix)
        ranked = tuple(sorted(self.candidates, key=lambda c: (not c.fits, c.outcome.step_s)))
        return Ranking(ranked, n_splits, len(ranked), self.n_looked_at, self.n_too_large, refused)


def _checked(
    config: Config, split: Split, scheduler: str, check_memory: CheckMemory | None
) -> tuple[Config, tuple[str, ...] | None]:
    """Return the settings with this split, and why they do not fit into memory. Raises ConfigError: refused."""
    changed = layout.with_split(config, split, scheduler)
    check_config(changed)
    return changed, None if check_memory is None else tuple(check_memory(changed))


def _outcome(changed: Config, split: Split, workload: Workload, rates: Rates, seed: int) -> Outcome:
    scheduler = changed.trainer.scheduler
    bound = max_staleness(changed, scheduler)
    return simulate(scheduler, layout.sizes(changed, split), workload, rates, max_staleness=bound, seed=seed)
