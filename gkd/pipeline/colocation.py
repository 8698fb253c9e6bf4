"""GPU time-sharing between the actor and the rollout engines (`trainer.colocate`).

    generate -> engines sleep -> train -> weight sync (both models resident) -> offload actor, wake engines

Actor calls reload the states they need and offload them afterwards, so this module only puts the engines to sleep and
wakes them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from gkd.metrics.run_metrics import StepMetrics
from gkd.roles import ActorRole, RolloutRole

KEEP_WEIGHTS, DISCARD_WEIGHTS = 1, 2  # sleep levels: weights in host memory, or none because new ones follow


class GpuSharing:
    """Context managers for the rollout phase and the training phase; no-ops if the pools have separate GPUs."""

    def __init__(self, actor: ActorRole, rollout: RolloutRole, *, shared: bool) -> None:
        self._actor, self._rollout, self._shared = actor, rollout, shared

    @contextmanager
    def for_rollout(self, m: StepMetrics | None = None, *, needed: bool = True) -> Iterator[None]:
        """Offload the actor and wake the engines, so that they can generate.

        Args:
            m: receives the duration of the switch as stage `switch`.
            needed: False: the block generates nothing, so nothing is moved.
        """
        if self._shared and needed:
            with m.stage("switch") if m is not None else nullcontext():
                self._actor.offload_states()  # also ranks that the last call did not reach
                self._rollout.reload_states()
        yield

    @contextmanager
    def for_training(self, m: StepMetrics | None = None, *, new_weights_follow: bool = False) -> Iterator[None]:
        """Put the engines to sleep, so that the actor can be called.

        Args:
            m: as above.
            new_weights_follow: the block ends with a weight sync, so the engines discard the old weights.
        """
        if self._shared:
            with m.stage("switch") if m is not None else nullcontext():
                self._rollout.offload_states(level=DISCARD_WEIGHTS if new_weights_follow else KEEP_WEIGHTS)
        yield
