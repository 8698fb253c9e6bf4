"""Define the values of `trainer.scheduler`: how far rollouts run ahead of training, and what a step trains on.

sync            generate a batch with the newest weights, then train on it
one_step_off    generate the next batch while training on this one
two_step_off    prefetch two batches: while one is trained on, one is scored and one is generated
stream          no batches in the engines: prompts enter one by one, weights are updated in the middle of responses,
                and a step trains on prompts that are finished, while the last ones of its batch are generated
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gkd.config.schema import TrainerConfig

# Prefetched batches. Each is generated with one version of the weights, so this is also its staleness.
AHEAD = {"sync": 0, "one_step_off": 1, "two_step_off": 2}
STREAM = "stream"


def staleness_bound(trainer: TrainerConfig) -> int:
    """Return the most steps between the oldest weights that generated a sequence and the step that trains on it."""
    return AHEAD.get(trainer.scheduler, trainer.max_staleness)
