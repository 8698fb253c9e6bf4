"""Report silence: of the run, by a line about what it is doing, and of the teacher, once for all endpoints."""

from __future__ import annotations

from collections.abc import Sequence

from gkd.log import get_logger
from gkd.spans import Activity, Phase
from gkd.types import TeacherHealth

FIRST_S = 4.0  # of silence; with the poll of `terminal`, a line comes within 5 s also on a busy machine


class Heartbeat:
    """Return a line after 4 s of silence and then every 4 s; within a step after 4, 8, 16, 32, 64 s, and so on.

    Steps recur, so that a long stage of each step would fill a log file otherwise.
    """

    def __init__(self) -> None:
        self._since_s: float | None = None  # begin of the silence
        self._next_s = FIRST_S  # of silence

    def line(self, now_s: float, spoke_s: float, doing: Sequence[Activity]) -> str:
        """Return the line that is due now, or an empty string.

        Args:
            spoke_s: time of the newest line of the run.
            doing: the current activities, outermost first.
        """
        if spoke_s != self._since_s:
            self._since_s, self._next_s = spoke_s, FIRST_S
        silent_s = now_s - spoke_s
        if silent_s < self._next_s or not doing:
            return ""
        self._next_s = 2 * silent_s if doing[0].what is Phase.STEP else silent_s + FIRST_S
        return f"{described(doing)}: {now_s - current_stage(doing).since_s:.0f} s so far"


def current_stage(doing: Sequence[Activity]) -> Activity:
    """Return the activity whose duration interests: the stage within a step, otherwise the outermost one."""
    return doing[1] if len(doing) > 1 and doing[0].what is Phase.STEP else doing[0]


def described(doing: Sequence[Activity]) -> str:
    """Return e.g. "step 12/120, teacher, teacher scoring 3/8"."""
    return ", ".join(str(activity) for activity in doing)


log = get_logger("teacher")

FIRST_WARNING_S = 10.0


class TeacherWatch:
    """Receives the health of the teacher and logs a warning after 10, 20, 40, ... s of silence, and when it ends."""

    def __init__(self) -> None:
        self.health: TeacherHealth | None = None  # the newest one
        self._next_s = FIRST_WARNING_S
        self._warned_s = 0.0

    @property
    def is_silent(self) -> bool:
        """Return whether a silence is reported whose end is not."""
        return self._warned_s > 0

    def add(self, health: TeacherHealth) -> None:
        self.health = health
        if health.silent_s >= self._next_s:
            self._warned_s, self._next_s = health.silent_s, 2 * self._next_s
            log.warning(
                "%s silent for %.0f s, waiting up to %.0f s (teacher.outage_budget_s)",
                health.label,
                health.silent_s,
                health.budget_s,
            )
        elif health.silent_s < self._warned_s:
            log.warning("the teacher replies again after more than %.0f s", self._warned_s)
            self._warned_s, self._next_s = 0.0, FIRST_WARNING_S
