"""What a simulated run says of one split: times, who was busy, who was waited for."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from gkd.metrics.pools import bottleneck
from gkd.tools.split_tuner.rates import Rates, Sizes, Workload

POOLS = ("rollout", "teacher", "actor")


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of the steps after the warm-up."""

    step_s: float  # mean
    response_tokens_per_s: float
    waited: dict[str, float]  # by pool, share of the step that the loop waited for it
    busy: dict[str, float]  # by pool, share of its GPUs' time
    bound_by: str  # the pool that the loop waits for, see `gkd.metrics.pools.bottleneck`
    staleness: dict[int, float]  # share of the student's sequences by how many steps old they were


@dataclass(slots=True)
class Totals:
    """Sums over the steps that count."""

    n_steps: int = 0
    response_tokens: float = 0.0
    waited_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(POOLS, 0.0))
    ages: Counter[int] = field(default_factory=Counter)

    def outcome(self, scheduler: str, wall_s: float, busy_s: dict[str, float], sizes: Sizes) -> Outcome:
        """`wall_s`: of all steps that count; `busy_s`: of each pool's members together, in that time."""
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
    """How long the actor trains on these sequences: as long as the data-parallel group with most tokens.

    Args:
        tokens: [m], prompt and response, of each sequence.
        groups: [m] int, the group that it was written for.
    """
    if workload.balance:  # moves whole sequences, so no group has less than the longest one
        heaviest = max(float(tokens.sum()) / sizes.dp, float(tokens.max()))
    else:
        heaviest = float(np.bincount(groups, tokens, sizes.dp).max())
    return rates.train_s + rates.train_token_s * heaviest
