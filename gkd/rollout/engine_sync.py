"""Weight sync with engines that may die: repeat a push for the engines that are left."""

from __future__ import annotations

from functools import partial

from gkd.handles import SyncReport
from gkd.rollout.recovery import Engines
from gkd.weight_sync.coordinator import WeightSync


class EngineSync:
    """Implements `gkd.roles.WeightSyncRole`.

    Args:
        timeout_s: of the wait for a restarted engine, if none is up.
    """

    def __init__(self, sync: WeightSync, engines: Engines, timeout_s: float) -> None:
        self._sync, self._engines, self._timeout_s = sync, engines, timeout_s

    def push(self, policy_version: int) -> SyncReport:
        """Send the actor's weights to every engine that is up; blocks. A restarted engine gets them when it joins.

        Raises:
            WeightSyncError: see `WeightSync.push`; not for engines that died.
            RankTimeout: no engine was up in time.
        """
        report = self._engines.sync(partial(self._sync.push, policy_version), self._timeout_s)
        return report or SyncReport(n_bytes=0, verified_tensors=0)
