"""When to give a silent teacher up: a clock that only counts time in which someone waited and listened.

A stopped process (SIGSTOP, a suspended machine, a debugger) finds minutes gone at its next turn. Those
were not the server's, so one turn of the loop counts as half a second at most.
"""

from __future__ import annotations

import time

_LONGEST_TURN_S = 0.5


class OutageClock:
    """Times since the last sign of life and the last useful answer, against their budgets. For one thread.

    Args:
        outage_budget_s: longest silence, heartbeats included.
        stall_budget_s: longest time without `progressed`, heartbeats or not.
    """

    def __init__(self, *, outage_budget_s: float, stall_budget_s: float) -> None:
        self.now_s = 0.0  # advances with `tick` only
        self.ever_heard = False
        self.outage_budget_s, self._stall_budget_s = outage_budget_s, stall_budget_s
        self._ticked_s = time.monotonic()
        self._heard_s = self._progress_s = 0.0

    def tick(self) -> None:
        """One turn of the loop has passed."""
        monotonic_s = time.monotonic()
        self.now_s += min(monotonic_s - self._ticked_s, _LONGEST_TURN_S)
        self._ticked_s = monotonic_s

    def restart(self) -> None:
        """Somebody begins to wait: both budgets start now."""
        self.tick()
        self._heard_s = self._progress_s = self.now_s

    def heard(self) -> None:
        """The server said something."""
        self._heard_s, self.ever_heard = self.now_s, True

    def progressed(self) -> None:
        """The server gave what was asked for, or has nothing to do."""
        self._progress_s = self.now_s

    @property
    def silent_s(self) -> float:
        return self.now_s - self._heard_s

    def problem(self) -> str:
        """Which budget is spent, in words; empty if none is."""
        stalled_s = self.now_s - self._progress_s
        if self.silent_s > self.outage_budget_s:
            return f"nothing heard for {self.silent_s:.1f} s"
        if stalled_s > self._stall_budget_s:
            return f"the server is alive but has answered nothing for {stalled_s:.1f} s"
        return ""
