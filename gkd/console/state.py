"""The state of a run as its terminal shows it, from the lines of metrics.jsonl: the step line, the time that remains.

Pure.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import itemgetter

from gkd.console.numbers import clock, count, seconds, short

TREND_STEPS = 20  # the trend compares the halves of this window
_FEWEST = 8  # steps for a trend
_ENDS = 5  # steps at the begin and the end of a run whose mean loss the closing table compares
_POOLS = ("rollout", "teacher", "actor")
MAX_LINE = 110  # characters of the log line of a step, with the logger's prefix
PREFIX = len("12:34:56 [gkd.trainer] ")
STEP_LINE = {"is_step_line": True}  # `extra` of its log record: a panel replaces it


@dataclass(slots=True)
class Evaluations:
    """First and newest evaluation of the run.

    Args:
        first, last: "eval/kl", "eval/reverse_kl", "eval/accuracy": those that the run measures.
    """

    first: dict[str, float] = field(default_factory=dict)
    last: dict[str, float] = field(default_factory=dict)
    step: int = 0  # the newest one
    n: int = 0

    def add(self, step: int, numbers: Mapping[str, float]) -> None:
        found = {key: value for key, value in numbers.items() if key.startswith("eval/") and value is not None}
        if found:  # an evaluation that was interrupted has none, but a time
            self.first = self.first or found
            self.last, self.step, self.n = found, step, self.n + 1


class RunState:
    """Numbers of a run so far.

    Attributes:
        numbers: of the newest step.
        step: optimizer steps made.
        first_step: step at which this start of the run began.

    Args:
        forecast: of the remaining time.
        clock: seconds; the clock of the panel.
    """

    def __init__(self, total_steps: int, forecast: Forecast, clock: Callable[[], float] = time.monotonic) -> None:
        self.total_steps, self._forecast, self._clock = total_steps, forecast, clock
        self.began_s = self._stepped_s = clock()
        self.step = self.first_step = 0
        self.numbers: Mapping[str, float] = {}
        self.evaluations = Evaluations()
        self.step_s = self.tokens = 0.0  # sums over the steps of this start
        self.alarms: dict[str, int] = {}  # name -> number of steps with it
        self.active_alarms: list[str] = []  # alarms of the newest line
        self.first_losses: list[float] = []
        self.last_losses: deque[float] = deque(maxlen=_ENDS)
        self._kls: deque[float] = deque(maxlen=TREND_STEPS)

    def add_past(self, step: int, numbers: Mapping[str, float]) -> None:
        """Add a line that an earlier start of the run has written."""
        self.step = self.first_step = step
        self._add(step, numbers)

    def add(self, step: int, numbers: Mapping[str, float]) -> None:
        """Add a step, or an evaluation before the first step."""
        self._add(step, numbers)
        self._forecast.add(step, numbers)
        if "loss/total" in numbers:
            self.step, self.numbers, self._stepped_s = step, numbers, self._clock()
            self.step_s += numbers["time/step_s"]
            self.tokens += numbers.get("loss/tokens", 0.0)

    def _add(self, step: int, numbers: Mapping[str, float]) -> None:
        self.evaluations.add(step, numbers)
        self.active_alarms = [key[7:] for key, value in numbers.items() if key.startswith("health/") and value]
        for name in self.active_alarms:
            self.alarms[name] = self.alarms.get(name, 0) + 1
        loss = numbers.get("loss/total")
        if loss is not None:
            if len(self.first_losses) < _ENDS:
                self.first_losses.append(loss)
            self.last_losses.append(loss)
        kl = kl_of(numbers)[1]
        if kl is not None:
            self._kls.append(kl)

    @property
    def elapsed_s(self) -> float:
        return self._clock() - self.began_s

    @property
    def left_s(self) -> float | None:
        """Return the estimated time to the end of the last step, from now; None: not known yet."""
        left_s = self._forecast.left_s()
        return None if left_s is None else max(0.0, left_s - (self._clock() - self._stepped_s))

    @property
    def trend(self) -> float | None:
        """Return the relative change of the KL between the halves of the newest steps; None: too few, or KL is 0."""
        kls = list(self._kls)
        if len(kls) < _FEWEST:
            return None
        half = len(kls) // 2
        before, after = sum(kls[:half]) / half, sum(kls[half:]) / (len(kls) - half)
        return (after - before) / abs(before) if abs(before) > 1e-12 else None


def kl_of(numbers: Mapping[str, float]) -> tuple[str, float | None]:
    """Return label and value of a step's KL; the estimate k1 of the sampled tokens if there is no distribution."""
    if (kl := numbers.get("loss/token_kl")) is not None:
        return "KL", kl
    return "k1", numbers.get("loss/sampled_reverse_kl")


def bottleneck_of(numbers: Mapping[str, float]) -> tuple[str, float] | None:
    """Return the bottleneck pool and the share of the step that the loop waited for it; None: not measured."""
    for pool in _POOLS:
        if numbers.get(f"perf/bound_by_{pool}"):
            return pool, numbers[f"perf/waited_{pool}_share"]
    return None


def rates_of(numbers: Mapping[str, float]) -> dict[str, float]:
    """Return tokens per second of engines and actor while they work: generated, trained."""
    response = numbers.get("rollout/response_tokens", 0.0)
    generating_s = numbers["time/step_s"] - numbers.get("time/eval_s", 0.0)
    parts = {
        "rollout": (response, numbers.get("perf/rollout_busy_share", 0.0) * generating_s),
        "actor": (response + numbers.get("rollout/prompt_tokens", 0.0), numbers.get("time/train_s")),
    }
    return {pool: tokens / spent_s for pool, (tokens, spent_s) in parts.items() if tokens and spent_s}


def is_worse(key: str, before: float, after: float) -> bool:
    """Return whether a loss rose or an accuracy fell, by more than a hundredth of it."""
    rise = after - before
    return (-rise if key == "eval/accuracy" else rise) > 0.01 * abs(before)


RECENT = 20  # steps whose mean duration counts
NOT_EACH_STEP = ("eval", "checkpoint", "record")  # stages that not every step has
_RECENT_EVALUATIONS = 3
_FEW = 4


class Forecast:
    """Receives the numbers of each step.

    An evaluation counts for the steps that will have one, a checkpoint or a recording by its mean share of all steps.

    Args:
        total_steps: of the run.
        eval_every: steps between evaluations; 0: only after the last step.
        evaluates: whether there are validation prompts.
    """

    def __init__(self, total_steps: int, eval_every: int, *, evaluates: bool) -> None:
        self._total, self._every, self._evaluates = total_steps, eval_every, evaluates
        self._plain_s: deque[float] = deque(maxlen=RECENT)
        self._eval_s: deque[float] = deque(maxlen=_RECENT_EVALUATIONS)
        self._n_steps = 0
        self._saves_s = 0.0
        self._step = 0

    def add(self, step: int, numbers: Mapping[str, float]) -> None:
        """Add the numbers of a step, or those of an evaluation before the first step."""
        self._step = step
        eval_s = numbers.get("time/eval_s", 0.0)
        if eval_s:
            self._eval_s.append(eval_s)
        if "loss/total" not in numbers:
            return
        saves_s = numbers["time/step_s"] - eval_s - plain_s(numbers)
        if self._n_steps == 1:
            self._plain_s.clear()  # the first step of a start warms up
        self._plain_s.append(plain_s(numbers))
        self._saves_s += saves_s
        self._n_steps += 1

    def left_s(self) -> float | None:
        """Return the seconds from the end of the newest step to the end of the last one; None: no step was made."""
        left = self._total - self._step
        if left <= 0:
            return 0.0
        if not self._plain_s:
            return None
        recent_s = sorted(self._plain_s)
        if len(recent_s) > _FEW:
            recent_s.pop()  # one outage must not multiply the estimate
        steps_s = left * (sum(recent_s) / len(recent_s) + self._saves_s / self._n_steps)
        eval_s = sum(self._eval_s) / len(self._eval_s) if self._eval_s else 0.0
        return steps_s + self._evaluations_left() * eval_s

    def _evaluations_left(self) -> int:
        if not self._evaluates:
            return 0
        if not self._every:
            return 1
        periodic = self._total // self._every - self._step // self._every
        return periodic + (self._total % self._every > 0)


def plain_s(numbers: Mapping[str, float]) -> float:
    """Return the duration of a step without evaluation, checkpoint and recording."""
    return numbers["time/step_s"] - sum(numbers.get(f"time/{stage}_s", 0.0) for stage in NOT_EACH_STEP)


def step_line(state: RunState, remark: str = "") -> str:
    """Return step, remaining time, loss, KL and its trend, duration, tokens/s, and the pool that was waited for.

    Fields at the end are left out if the line would be too long.

    Args:
        remark: a short warning; before the fields that may be left out.
    """
    m = state.numbers
    label, kl = kl_of(m)
    alarms = state.active_alarms
    bottleneck = bottleneck_of(m)
    trend = "" if state.trend is None else f" {max(-9.99, min(9.99, state.trend)):+.0%}"
    fields = [
        f"step {state.step}/{state.total_steps}",
        f"ETA {clock(state.left_s)}",
        f"loss {short(m['loss/total'])}",
        "" if kl is None else f"{label} {short(kl)}{trend}",
        f"ALARM {alarms[0][:20]}" + (f" +{len(alarms) - 1}" if len(alarms) > 1 else "") if alarms else "",
        remark,
        seconds(m["time/step_s"]) + _without(m),
        f"{count(m['rollout/response_tokens'] / plain_s(m))} tok/s",
        "" if bottleneck is None else f"{bottleneck[0]} {bottleneck[1]:.0%}",
    ]
    fields = [field for field in fields if field]
    while len(line := "  ".join(fields)) > MAX_LINE - PREFIX:
        fields.pop()
    return line


def _without(m: Mapping[str, float]) -> str:
    """Return what an evaluation or a checkpoint took of the step, if it was much."""
    name, taken_s = max(
        (("eval", m.get("time/eval_s", 0.0)), ("save", m.get("time/checkpoint_s", 0.0))), key=itemgetter(1)
    )
    return f" ({name} {seconds(taken_s).removesuffix(' s')})" if taken_s > 0.2 * m["time/step_s"] else ""
