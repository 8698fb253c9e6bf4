"""GPU time-sharing between the actor and the rollout engines (`trainer.colocate`).

    generate -> engines sleep -> train -> weight sync (both models resident) -> offload actor, wake engines

Actor calls reload the states they need and offload them afterwards, so this module puts the engines to sleep and wakes
them. Before a training step it also starts the reload early, so that it overlaps with the wait for the teacher.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from gkd.config.schema import Config
from gkd.config.schema_teacher import ACTOR
from gkd.metrics.run_metrics import StepMetrics
from gkd.roles import Pending, Roles

# Sleep levels of an engine.
KEEP_WEIGHTS = 1  # in host memory
DISCARD_WEIGHTS = 2  # new ones follow


class GpuSharing:
    """Context managers for the rollout phase and the training phase; no-ops if the pools have separate GPUs."""

    def __init__(self, config: Config, roles: Roles) -> None:
        derived = config.derived
        self._actor = roles.actor
        self._rollout = roles.rollout
        self._shared = config.trainer.colocate
        # Reload the actor while the teacher scores, unless a local teacher or a reference computes on its GPUs then.
        self.reload_early = derived.teacher_pool != ACTOR and not derived.loss.has_reference
        # The engines must not discard their weights if a weight sync sends only adapters.
        self._keeps_weights = derived.engine_adapter_rank > 0

    @contextmanager
    def for_rollout(self, m: StepMetrics | None = None, *, needed: bool = True) -> Iterator[None]:
        """Offload the actor and wake the engines, so that they can generate.

        Args:
            m: receives the duration of the switch as stage `switch`.
            needed: False: the block generates nothing, so nothing is moved.
        """
        if self._shared and needed:
            with m.stage("switch") if m is not None else nullcontext():
                self._actor.offload_states()  # the last call may not have reached every rank
                self._rollout.reload_states()
        yield

    @contextmanager
    def for_training(self, m: StepMetrics | None = None, *, new_weights_follow: bool = False) -> Iterator[None]:
        """Put the engines to sleep, so that the actor can be called.

        Args:
            m: as above.
            new_weights_follow: the block trains and ends with a weight sync, so the engines discard the old weights.

        Raises ClusterError: a rank could not reload its states.
        """
        reload: Pending[object] | None = None
        if self._shared:
            with m.stage("switch") if m is not None else nullcontext():
                discard = new_weights_follow and not self._keeps_weights
                self._rollout.offload_states(level=DISCARD_WEIGHTS if discard else KEEP_WEIGHTS)
                if new_weights_follow and self.reload_early:
                    reload = self._actor.reload_states(blocking=False)
        yield
        if reload is not None:
            reload.wait()  # long done; a failed train step has raised the same error
