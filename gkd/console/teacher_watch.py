"""Report an outage of the teacher once for the run, however many endpoints wait for it."""

from __future__ import annotations

from gkd.log import get_logger
from gkd.types import TeacherHealth

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
