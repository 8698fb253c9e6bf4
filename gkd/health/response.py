"""Log the alarms of a run, and pause or stop it as `health.on_alarm` requests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from time import monotonic, sleep

from gkd.config.schema import Config
from gkd.errors import HealthAlarm
from gkd.health.monitor import Alarm, Monitor
from gkd.log import get_logger
from gkd.run.disk import naming
from gkd.run.interrupts import interruptible

log = get_logger("health")

CONTINUE = "continue"  # file of the run folder that ends a pause
_POLL_S = 0.2
_FIRST_NOTICE_S, _LONGEST_NOTICE_S = 60.0, 3600.0


class HealthResponse:
    """The health checks of one run.

    Args:
        run_dir: the run folder.
    """

    def __init__(self, config: Config, run_dir: Path) -> None:
        self._on_alarm, self._file = config.health.on_alarm, run_dir / CONTINUE
        self._monitor = Monitor.of(config)
        self._new: list[Alarm] = []

    def replay(self, lines: Iterable[Mapping[str, float | None]]) -> None:
        """Rebuild the history of a resumed run; its alarms are not new."""
        for line in lines:
            self._monitor.feed(line)
        for alarm in self._monitor.alarms.values():
            log.warning("alarm that still lasts: %s", alarm)

    def numbers(self, step: int, line: Mapping[str, float]) -> dict[str, float]:
        """Return `health/<check>` for a line, and log the alarms that start or clear with it."""
        changes = self._monitor.feed({"step": step, **line})
        for alarm in changes.cleared:
            log.info("alarm cleared at step %d: %s, which began at step %d", step, alarm.check.name, alarm.step)
        for alarm in changes.started:
            log.warning("ALARM %s", alarm)
        self._new += changes.started
        return changes.numbers

    def respond(self, save: Callable[[], object]) -> None:
        """Do what health.on_alarm requests for the alarms since the last call; returns at once if there are none.

        Args:
            save: save the last finished step, and wait for it. Called before a pause and before the error.

        Raises:
            HealthAlarm: health.on_alarm is stop.
            CheckpointError: the step cannot be saved.
        """
        new, self._new = self._new, []
        if not new or self._on_alarm == "warn":
            return
        if self._on_alarm == "pause":
            with naming(self._file, "deleted"):
                self._file.unlink(missing_ok=True)  # of an earlier pause
        save()
        if self._on_alarm == "stop":
            raise HealthAlarm("; ".join(map(str, new)), [alarm.check.name for alarm in new])
        self._pause(new)

    def _pause(self, alarms: Iterable[Alarm]) -> None:
        names = ", ".join(alarm.check.name for alarm in alarms)
        began_s, notice_s = monotonic(), _FIRST_NOTICE_S
        log.warning("paused by %s; the step is saved. To continue: touch %s. Ctrl-C ends the run", names, self._file)
        with interruptible():
            while not self._file.exists():
                sleep(_POLL_S)
                if monotonic() - began_s >= notice_s:
                    log.warning("paused for %.0f min by %s. To continue: touch %s", notice_s / 60, names, self._file)
                    notice_s += min(notice_s, _LONGEST_NOTICE_S)
        with naming(self._file, "deleted"):
            self._file.unlink(missing_ok=True)
        log.info("the run continues")
