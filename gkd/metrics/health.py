"""Decide from the lines of a run when the alarms of the checks start and clear."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic, sleep

from gkd.config.schema import Config
from gkd.errors import HealthAlarm
from gkd.log import get_logger
from gkd.metrics.health_checks import CHECKS, NEED_EQUAL_SAMPLING, Check, History, NoNumbers
from gkd.run.disk import naming
from gkd.run.interrupts import interruptible

CLEAR_AFTER = 10  # verdicts without a finding in a row; an evaluation's check has few, see `Monitor`
PREFIX = "health/"


@dataclass(frozen=True, slots=True)
class Alarm:
    """A check that found something: at which step, and what."""

    check: Check
    step: int
    evidence: str

    def __str__(self) -> str:
        check = self.check
        cause, change = f"Likely cause: {check.cause}.", f"Change: {check.change}."
        return f"{check.name} at step {self.step}: {self.evidence}. {cause} {change}".replace("`", "")


@dataclass(slots=True)
class Changes:
    """List what one line changed.

    Attributes:
        remarks: facts that need no alarm, each once in a run.
        numbers: `health/<check>` of each check that has had a verdict: 1 while its alarm lasts, else 0.
    """

    numbers: dict[str, float] = field(default_factory=dict)
    started: list[Alarm] = field(default_factory=list)
    cleared: list[Alarm] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)


class Monitor:
    """The checks of one run. Its state depends only on the lines, so a resumed run rebuilds it from the file.

    An alarm starts with the first finding. It clears after `CLEAR_AFTER` verdicts without one in a row, so that a value
    around the limit gives one alarm; the checks of evaluations clear with the next good evaluation.

    Args:
        off: checks to leave out.
        limits: by check, instead of `Check.limit`.
    """

    def __init__(self, off: Collection[str] = (), limits: Mapping[str, float] | None = None) -> None:
        self._checks: Sequence[tuple[Check, float]] = [
            (check, (limits or {}).get(check.name, check.limit)) for check in CHECKS if check.name not in off
        ]
        self._history = History()
        self._numbers: dict[str, float] = {}
        self._remarked: set[str] = set()
        self._well: dict[str, int] = {}  # verdicts without a finding in a row
        self.alarms: dict[str, Alarm] = {}  # check -> its alarm that lasts

    @classmethod
    def of(cls, config: Config) -> Monitor:
        """Return the monitor of a run, without the checks that its settings make meaningless."""
        rollout, off = config.rollout, list(config.health.checks_off)
        temperatures = {route.teacher.temperature for route in config.derived.routes}
        if temperatures != {rollout.temperature} or rollout.truncation or config.trainer.replay:
            off += NEED_EQUAL_SAMPLING
        return cls(off, config.health.limits)

    def feed(self, line: Mapping[str, float | None]) -> Changes:
        """Add one line, with its step, and return what it changes."""
        self._history.add(line)
        changes = Changes()
        for check, limit in self._checks:
            try:
                verdict = check.judge(self._history, limit)
            except NoNumbers:
                continue
            name = check.name
            if verdict.remark and name not in self._remarked:
                self._remarked.add(name)
                changes.remarks.append(verdict.remark)
            self._well[name] = 0 if verdict.is_sick else self._well.get(name, 0) + 1
            if verdict.is_sick and name not in self.alarms:
                self.alarms[name] = Alarm(check, int(line["step"] or 0), verdict.evidence)
                changes.started.append(self.alarms[name])
            elif name in self.alarms and self._well[name] >= (1 if check.is_of_evaluation else CLEAR_AFTER):
                changes.cleared.append(self.alarms.pop(name))
            self._numbers[PREFIX + name] = float(name in self.alarms)
        changes.numbers = dict(self._numbers)
        return changes


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
        for remark in changes.remarks:
            log.info("step %d: %s", step, remark)
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
                self._file.unlink(missing_ok=True)  # left by an earlier pause
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
