"""Run `gkd.main_gkd` with a fault injected from outside; helper of bench_health.

    python -m tests.bench.health_fault FAULT STEPS --config X.yaml [key=value ...]

FAULT: `none`; `frozen`: after the first training step the engines keep their weights, but their rollouts are labelled
with the new version; `stale`: only every 8th weight sync takes place, and the check of the staleness is off. The run is
interrupted after STEPS steps, so that the schedule of the learning rate is that of a full run.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import gkd.trainer
from gkd.main_gkd import main
from gkd.metrics.run_metrics import StepMetrics
from gkd.rollout.driver.pool import RolloutPool
from gkd.rollout.driver.weight_sync import WeightSync
from gkd.trainer import Trainer
from gkd.types import RolloutChunk, SyncReport

STALE_EVERY = 8
_VERIFIED = 2  # pushes whose digests weight_sync.verify=first compares; a frozen sync passes them


def inject(fault: str) -> None:
    """Patch the driver's classes. Raises ValueError for an unknown fault."""
    push, generate = WeightSync.push, RolloutPool.generate
    if fault == "none":
        return
    if fault == "frozen":
        version = [0]

        def frozen_push(self: WeightSync, policy_version: int) -> SyncReport:
            version[0] = policy_version
            return push(self, policy_version) if policy_version < _VERIFIED else SyncReport(0, 0)

        def relabelled(self: RolloutPool, *args: Any, **named: Any) -> Iterator[RolloutChunk]:
            for chunk in generate(self, *args, **named):
                changed = replace(chunk, sizes=chunk.sizes.copy())
                changed.versions[:] = version[0]
                yield changed

        WeightSync.push, RolloutPool.generate = frozen_push, relabelled  # type: ignore[method-assign]
    elif fault == "stale":

        def rare_push(self: WeightSync, policy_version: int) -> SyncReport:
            return push(self, policy_version) if policy_version % STALE_EVERY == 0 else SyncReport(0, 0)

        WeightSync.push = rare_push  # type: ignore[method-assign]
        gkd.trainer.check_staleness = lambda *_: None  # type: ignore[attr-defined]
    else:
        raise ValueError(fault)


def interrupt_after(steps: int) -> None:
    """Interrupt the training loop after this many steps, as Ctrl-C does."""
    train = Trainer.train_one_batch

    def limited(self: Trainer, m: StepMetrics) -> None:
        if self.step >= steps:
            raise KeyboardInterrupt
        train(self, m)

    Trainer.train_one_batch = limited  # type: ignore[method-assign]


if __name__ == "__main__":
    inject(sys.argv[1])
    interrupt_after(int(sys.argv[2]))
    sys.exit(main(sys.argv[3:]))
