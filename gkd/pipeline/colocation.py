"""Who may hold the GPUs now, where actor and engines share them (`trainer.colocate`):

    generate -> engines asleep -> train -> weight sync, both sides' weights there -> actor away, engines awake

Between two calls the actor's states are in host memory: a call on it brings back what it needs, and what came goes
again after it. So all that is left to do is to put the engines to sleep and to wake them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from gkd.metrics.writer import StageTimers
from gkd.roles import ActorRole, RolloutRole

# Of an engine's sleep: its weights wait in host memory, or are dropped where the next thing it gets is new ones.
KEEP_WEIGHTS, DROP_WEIGHTS = 1, 2


class GpuSharing:
    """Two blocks that take turns; where the pools have GPUs of their own they do nothing."""

    def __init__(self, actor: ActorRole, rollout: RolloutRole, *, shared: bool) -> None:
        self._actor, self._rollout, self._shared = actor, rollout, shared

    @contextmanager
    def generating(self, timers: StageTimers | None = None) -> Iterator[None]:
        """In it the engines may answer: the actor's states are in host memory.

        Args:
            timers: get the time of the switch as the stage `switch`.
        """
        if self._shared:
            with timers("switch") if timers is not None else nullcontext():
                self._actor.offload_states()  # also ranks that the last call did not reach
                self._rollout.reload_states()
        yield

    @contextmanager
    def training(self, timers: StageTimers | None = None, *, sync_follows: bool = False) -> Iterator[None]:
        """In it the actor may be called: the engines have given their memory away.

        Args:
            timers: as above.
            sync_follows: the engines get new weights in this block, so that nobody keeps the old ones.
        """
        if self._shared:
            with timers("switch") if timers is not None else nullcontext():
                self._rollout.offload_states(level=DROP_WEIGHTS if sync_follows else KEEP_WEIGHTS)
        yield
