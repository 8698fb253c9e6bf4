"""Outcome of a simulated run of one split: step time, busy pools, bottleneck."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from gkd.metrics.pools import bottleneck
from gkd.tools.split_tuner.rates import Rates, Sizes, Workload

POOLS = ("rollout", "teacher", "actor")


@dataclass(frozen=True, slots=True)
class Outcome:
    """Means over the steps after the warm-up."""

    step_s: float  # mean
    response_tokens_per_s: float
    waited: dict[str, float]  # by pool, share of the step that the loop waited for it
    busy: dict[str, float]  # by pool, share of its GPUs' time
    bound_by: str  # the bottleneck, see `gkd.metrics.pools.bottleneck`
    staleness: dict[int, float]  # age in steps -> share of the rollouts


@dataclass(slots=True)
class Totals:
    """Sums over the measured steps."""

    n_steps: int = 0
    response_tokens: float = 0.0
    waited_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(POOLS, 0.0))
    ages: Counter[int] = field(default_factory=Counter)

    def outcome(self, scheduler: str, wall_s: float, busy_s: dict[str, float], sizes: Sizes) -> Outcome:
        """Return the outcome.

        Args:
            wall_s: duration of all measured steps.
            busy_s: pool -> busy time of its members together.
        """
        members = {"rollout": sizes.engines, "teacher": sizes.workers, "actor": 1}
        waited = {pool: s / wall_s for pool, s in self.waited_s.items()}
        bound_by, _ = bottleneck({f"perf/waited_{pool}_share": share for pool, share in waited.items()}, scheduler)
        n = sum(self.ages.values())
        return Outcome(
            step_s=wall_s / self.n_steps,
            response_tokens_per_s=self.response_tokens / wall_s,
            waited=waited,
            busy={pool: busy_s[pool] / members[pool] / wall_s for pool in POOLS},
            bound_by=bound_by,
            staleness={age: count / n for age, count in sorted(self.ages.items())},
        )


def train_seconds(tokens: np.ndarray, groups: np.ndarray, sizes: Sizes, workload: Workload, rates: Rates) -> float:
    """Return how long the actor trains on these sequences: the largest data-parallel group decides.

    Args:
        tokens: [m], prompt and response tokens of each sequence.
        groups: [m] int, its data-parallel group before balancing.
    """
    if workload.balance:  # it moves whole sequences, so the largest group has at least the longest one
        heaviest = max(float(tokens.sum()) / sizes.dp, float(tokens.max()))
    else:
        heaviest = float(np.bincount(groups, tokens, sizes.dp).max())
    return rates.train_s + rates.train_token_s * heaviest
