"""Ranks all splits of some GPUs under some schedulers: the closed form chooses, the simulation decides."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from gkd.config import Config
from gkd.config_check import check_config
from gkd.errors import ConfigError
from gkd.split import layout
from gkd.split.estimate import estimate
from gkd.split.layout import Hardware, Split
from gkd.split.outcome import Outcome
from gkd.split.rates import Rates, Workload, max_staleness
from gkd.split.simulate import simulate

_MOST = 60  # simulations of a scheduler
_LEAST = 4
_BUDGET_S = 30.0  # that a scheduler's simulations may take, beyond the least

# What is wrong with a run of these settings on the cards that there are, one sentence each; nothing: it fits.
CheckMemory = Callable[[Config], Sequence[str]]
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Candidate:
    split: Split
    scheduler: str
    outcome: Outcome
    too_large: tuple[str, ...] | None  # why it does not fit into memory; None: nobody looked

    @property
    def fits(self) -> bool:
        return not self.too_large


@dataclass(frozen=True, slots=True)
class Ranking:
    candidates: tuple[Candidate, ...]  # those that fit first, then by step time
    n_splits: int  # that there are, for each scheduler
    n_simulated: int


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
    """Simulates the splits that the closed form puts first: all of them where there are few.

    Raises:
        ConfigError: no split of so many GPUs is allowed by the config.
    """
    splits = list(layout.splits(config, hardware))
    if not splits:
        a, r = config.actor, config.rollout
        problem = (
            f"no split of them has actor.tp {a.tp} x actor.pp {a.pp} GPUs for the actor, rollout.tp {r.tp} for an "
            f"engine and {0 if hardware.workers_elsewhere else hardware.gpus_per_worker} for the teacher."
        )
        raise ConfigError("--gpus", hardware.n_gpus, problem, "use more GPUs, or smaller parallel sizes.")
    units = np.array([[s.actor.n_gpus, s.rollout.n_gpus, s.workers] for s in splits], float)
    dp, engines = units[:, 0] / (config.actor.tp * config.actor.pp), units[:, 1] / config.rollout.tp
    candidates: list[Candidate] = []
    for scheduler in schedulers:
        bound = max_staleness(config, scheduler)
        guessed = estimate(scheduler, dp, engines, units[:, 2], workload, rates, bound)
        began, n_done = time.monotonic(), 0
        for place in np.argsort(guessed, kind="stable").tolist():
            late = time.monotonic() - began > _BUDGET_S and n_done >= _LEAST
            if n_done == _MOST or late:
                break
            candidate = simulated(config, splits[place], scheduler, workload, rates, check_memory, seed)
            if candidate is None:
                continue
            candidates.append(candidate)
            n_done += 1
            progress(f"{scheduler}: {n_done} of {min(_MOST, len(splits))} splits simulated")
    candidates.sort(key=lambda c: (not c.fits, c.outcome.step_s))
    return Ranking(tuple(candidates), len(splits), len(candidates))


def simulated(
    config: Config,
    split: Split,
    scheduler: str,
    workload: Workload,
    rates: Rates,
    check_memory: CheckMemory | None,
    seed: int,
) -> Candidate | None:
    """None: the config's own checks refuse this split with this scheduler, or it cannot cut the model."""
    changed = layout.with_split(config, split, scheduler)
    try:
        check_config(changed)
        too_large = None if check_memory is None else tuple(check_memory(changed))
    except ConfigError:
        return None
    bound = max_staleness(changed, scheduler)
    sizes = layout.sizes(changed, split)
    outcome = simulate(scheduler, sizes, workload, rates, max_staleness=bound, seed=seed)
    return Candidate(split, scheduler, outcome, too_large)
