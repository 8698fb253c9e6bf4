"""Decide from the lines of a run when the alarms of the checks start and clear."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from gkd.config.routes import routes_of
from gkd.config.schema import Config
from gkd.health.checks import CHECKS, NEED_EQUAL_SAMPLING, Check
from gkd.health.history import History
from gkd.health.judges import by_staleness

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
        numbers: `health/<check>` of each check that has had a verdict: 1 while its alarm lasts, else 0.
    """

    numbers: dict[str, float] = field(default_factory=dict)
    started: list[Alarm] = field(default_factory=list)
    cleared: list[Alarm] = field(default_factory=list)


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
        self._well: dict[str, int] = {}  # verdicts without a finding in a row
        self.alarms: dict[str, Alarm] = {}  # that last, by check

    @classmethod
    def of(cls, config: Config) -> Monitor:
        """Return the monitor of a run, without the checks that its settings make meaningless."""
        rollout, off = config.rollout, list(config.health.checks_off)
        temperatures = {route.teacher.temperature for route in routes_of(config)}
        if temperatures != {rollout.temperature} or rollout.top_p < 1 or config.trainer.replay:
            off += NEED_EQUAL_SAMPLING
        return cls(off, config.health.limits)

    def feed(self, line: Mapping[str, float | None]) -> Changes:
        """Add one line, with its step, and return what it changes."""
        self._history.add(by_staleness(dict(line)))
        changes = Changes()
        for check, limit in self._checks:
            verdict = check.judge(self._history, limit)
            if verdict is None:
                continue
            name = check.name
            self._well[name] = 0 if verdict.is_sick else self._well.get(name, 0) + 1
            if verdict.is_sick and name not in self.alarms:
                self.alarms[name] = Alarm(check, int(line["step"] or 0), verdict.evidence)
                changes.started.append(self.alarms[name])
            elif name in self.alarms and self._well[name] >= (1 if check.is_of_evaluation else CLEAR_AFTER):
                changes.cleared.append(self.alarms.pop(name))
            self._numbers[PREFIX + name] = float(name in self.alarms)
        changes.numbers = dict(self._numbers)
        return changes
