"""Simulate a run of one split under one scheduler, as `gkd.trainer` runs it."""

from __future__ import annotations

from gkd.config.schema_trainer import STREAM
from gkd.tools.split_tuner import batches, stream
from gkd.tools.split_tuner.outcome import Outcome
from gkd.tools.split_tuner.rates import Rates, Sizes, Workload

_SEQUENCES = 60_000  # of a simulation, about: small batches are averaged, large ones take seconds
_STEPS = (6, 100)


def simulate(
    scheduler: str,
    sizes: Sizes,
    workload: Workload,
    rates: Rates,
    *,
    max_staleness: int = 1,
    seed: int = 0,
    n_steps: int = 0,
) -> Outcome:
    """Return the outcome of the steps after the warm-up; equal seeds give equal outcomes.

    Args:
        scheduler: `trainer.scheduler`.
        max_staleness: of `stream`; the other schedulers have a fixed bound.
        n_steps: measured steps; 0: enough for a stable mean.
    """
    n_steps = n_steps or _enough_steps(workload)
    if scheduler == STREAM:
        warm_up = max_staleness + 3
        return stream.run(max_staleness, sizes, workload, rates, n_steps=n_steps, warm_up=warm_up, seed=seed)
    return batches.run(scheduler, sizes, workload, rates, n_steps=n_steps, warm_up=3, seed=seed)


def _enough_steps(workload: Workload) -> int:
    """Return enough steps, with each measured step's lengths equally often if there are no more of those."""
    n_steps = int(min(max(_SEQUENCES / workload.n_sequences, _STEPS[0]), _STEPS[1]))
    n_rows = len(workload.lengths.tokens)
    return -(-n_steps // n_rows) * n_rows if n_rows <= n_steps else n_steps
