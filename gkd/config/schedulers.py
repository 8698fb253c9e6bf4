"""`trainer.scheduler`: how far the rollouts may run ahead of the training, and which of them a step takes.

sync            a batch is answered by the newest weights, then trained on
one_step_off    the next batch is answered while this one is trained on
two_step_off    the next two: while one is trained on, one is scored and one answered
stream          no batches in the engines: prompts go in one by one, new weights arrive in the middle of a response,
                and a step takes what is finished
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gkd.config.schema import TrainerConfig

# Batches begun before their turn. Each is answered by one version of the weights, so this is its staleness, too.
AHEAD = {"sync": 0, "one_step_off": 1, "two_step_off": 2}
STREAM = "stream"


def staleness_bound(trainer: TrainerConfig) -> int:
    """No sequence is trained on whose oldest part was written more than this many steps before."""
    return AHEAD.get(trainer.scheduler, trainer.max_staleness)
