"""Detect an outage: a clock that counts only time in which the client waited for the server.

After SIGSTOP, a suspend or a breakpoint, the client's loop finds that minutes have passed. The server is not to blame
for them, so one iteration of the loop counts for at most half a second.
"""

from __future__ import annotations

import time

_MAX_TICK_S = 0.5


class OutageClock:
    """Compare the times since the last message and since the last progress with their budgets. Not thread-safe.

    Args:
        outage_budget_s: maximum time without any message, heartbeats included.
        stall_budget_s: maximum time without `progressed`, even if heartbeats arrive.
    """

    def __init__(self, *, outage_budget_s: float, stall_budget_s: float) -> None:
        self.now_s = 0.0  # advances only in `tick`
        self.ever_heard = False
        self.outage_budget_s = outage_budget_s
        self._stall_budget_s = stall_budget_s
        self._ticked_s = time.monotonic()
        self._heard_s = 0.0
        self._progress_s = 0.0

    def tick(self) -> None:
        """Advance the clock; called in each iteration of the loop."""
        monotonic_s = time.monotonic()
        self.now_s += min(monotonic_s - self._ticked_s, _MAX_TICK_S)
        self._ticked_s = monotonic_s

    def restart(self) -> None:
        """Start both budgets now: a first request is pending."""
        self.tick()
        self._heard_s = self.now_s
        self._progress_s = self.now_s

    def heard(self) -> None:
        """Note that a message of the server arrived."""
        self._heard_s = self.now_s
        self.ever_heard = True

    def progressed(self) -> None:
        """Note that the server returned scores, or that it is not responsible for the wait."""
        self._progress_s = self.now_s

    @property
    def silent_s(self) -> float:
        return self.now_s - self._heard_s

    @property
    def last_heard(self) -> str:
        """Return when the last message arrived, for errors."""
        return f"{self.silent_s:.1f} s ago" if self.ever_heard else "never"

    def problem(self) -> str:
        """Return a description of the exceeded budget; empty if none is exceeded."""
        stalled_s = self.now_s - self._progress_s
        if self.silent_s > self.outage_budget_s:
            return f"no message for {self.silent_s:.1f} s"
        if stalled_s > self._stall_budget_s:
            return f"the server is alive but returned no scores for {stalled_s:.1f} s"
        return ""
