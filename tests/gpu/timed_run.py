"""Train without a checkpoint at the end, and for a time instead of a number of steps.

    python -m tests.gpu.timed_run CONFIG [--seconds S] [key=value ...]

`--seconds` counts from the first step. The student is exported then; without it nothing is saved: the checkpoint of a
1.5B student has 18 GB.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from gkd.api import load_config, open_pools
from gkd.trainer import Trainer


class TimedTrainer(Trainer):
    """Ends after the step in which the time is up."""

    seconds: float | None = None
    _until_s: float | None = None

    def train_one_batch(self, m: Any) -> None:
        if self.seconds is not None and self._until_s is None:
            self._until_s = time.monotonic() + self.seconds
        super().train_one_batch(m)
        if self._until_s is not None and time.monotonic() >= self._until_s:
            self.total_steps = self.step

    def save_now(self, *, scored: bool = True) -> None:
        """Save nothing."""

    def export(self) -> None:
        if self.seconds is not None:
            super().export()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.timed_run")
    parser.add_argument("config")
    parser.add_argument("--seconds", type=float)
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_intermixed_args()
    with open_pools(load_config(args.config, args.overrides)) as pools:
        plan = pools.plan
        trainer = TimedTrainer(plan.config, pools, plan.train_prompts, plan.val_prompts, plan.folder, plan.total_steps)
        trainer.seconds = args.seconds
        trainer.fit()


if __name__ == "__main__":
    main()
