"""The state of a run as its terminal shows it, from the lines of metrics.jsonl: step line, remaining time."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from statistics import fmean

from gkd.console.numbers import clock, count, seconds, short

SCORES = {"eval/kl": "KL", "eval/reverse_kl": "k1", "eval/accuracy": "accuracy"}  # of an evaluation
NOT_EACH_STEP = ("eval", "checkpoint", "record")  # stages that not every step has
_RECENT = 20  # steps that the trend and the mean duration consider
_FEWEST = 8  # steps for a trend
_POOLS = ("rollout", "teacher", "actor")
MAX_LINE = 110  # characters of the log line of a step, with the logger's prefix
PREFIX = len("12:34:56 [gkd.trainer] ")
STEP_LINE = {"is_step_line": True}  # `extra` of its log record: a panel replaces it


class RunState:
    """Numbers of a run so far.

    Attributes:
        evaluations: step and numbers of each one.
        losses: of each step that had a loss token.
        numbers: of the newest step.
        step: optimizer steps made.
        first_step: step at which this start of the run began.

    Args:
        clock: seconds; the clock of the panel.
    """

    def __init__(self, total_steps: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.total_steps = total_steps
        self._clock = clock
        self.began_s = self._stepped_s = clock()
        self.step = self.first_step = 0
        self.numbers: Mapping[str, float] = {}
        self.evaluations: list[tuple[int, dict[str, float]]] = []
        self.losses: list[float] = []
        self.step_s = self.tokens = self._plain_s = 0.0  # sums over the steps of this start
        self.alarms: dict[str, int] = {}  # name -> number of steps with it
        self.active_alarms: list[str] = []  # alarms of the newest line
        self._recent_s: deque[float] = deque(maxlen=_RECENT)
        self._kls: deque[float] = deque(maxlen=_RECENT)

    def add_past(self, step: int, numbers: Mapping[str, float]) -> None:
        """Add a line that an earlier start of the run has written."""
        self.step = self.first_step = step
        self._add(step, numbers)

    def add(self, step: int, numbers: Mapping[str, float]) -> None:
        """Add a step, or an evaluation before the first step."""
        self._add(step, numbers)
        if "loss/total" in numbers:
            self.step = step
            self.numbers = numbers
            self._stepped_s = self._clock()
            self.step_s += numbers["time/step_s"]
            self._plain_s += plain_s(numbers)
            self._recent_s.append(plain_s(numbers))
            self.tokens += numbers.get("loss/tokens", 0.0)

    def _add(self, step: int, numbers: Mapping[str, float]) -> None:
        finite = {key: value for key, value in numbers.items() if value is not None and not math.isnan(value)}
        evaluated = {key: value for key, value in finite.items() if key.startswith("eval/")}
        if evaluated:  # an evaluation that was interrupted has none, but a time
            self.evaluations.append((step, evaluated))
        self.active_alarms = [key[7:] for key, value in numbers.items() if key.startswith("health/") and value]
        for name in self.active_alarms:
            self.alarms[name] = self.alarms.get(name, 0) + 1
        if numbers.get("loss/tokens") != 0 and "loss/total" in numbers:
            self.losses.append(numbers["loss/total"])
        if (kl := kl_of(numbers)[1]) is not None:
            self._kls.append(kl)

    def scores(self) -> dict[str, tuple[float | None, float]]:
        """Return each measured key of SCORES in the first and the newest evaluation; None: there is no earlier one."""
        if not self.evaluations:
            return {}
        first = self.evaluations[0][1] if len(self.evaluations) > 1 else {}
        last = self.evaluations[-1][1]
        return {key: (first.get(key), last[key]) for key in SCORES if key in last}

    @property
    def elapsed_s(self) -> float:
        return self._clock() - self.began_s

    @property
    def left_s(self) -> float | None:
        """Return the estimated time to the end of the last step, from now; None: no step was made.

        Evaluations, checkpoints and recordings count by their mean share of the steps so far.
        """
        left = self.total_steps - self.step
        if left <= 0 or not self._recent_s:
            return 0.0 if left <= 0 else None
        recent_s = sorted(self._recent_s)[:-1] or self._recent_s  # without the warm-up, or an outage
        step_s = fmean(recent_s) + (self.step_s - self._plain_s) / (self.step - self.first_step)
        # A step that takes longer than the others, as in an outage of the teacher, does not bring the end nearer.
        return left * step_s - min(step_s, self._clock() - self._stepped_s)

    @property
    def trend(self) -> float | None:
        """Return the relative change of the KL between the halves of the newest steps; None: too few, or KL is 0."""
        kls = list(self._kls)
        half = len(self._kls) // 2
        if len(kls) < _FEWEST:
            return None
        before = fmean(kls[:half])
        after = fmean(kls[half:])
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


def plain_s(numbers: Mapping[str, float]) -> float:
    """Return the duration of a step without evaluation, checkpoint and recording."""
    return numbers["time/step_s"] - sum(numbers.get(f"time/{stage}_s", 0.0) for stage in NOT_EACH_STEP)


def changed(key: str, before: float | None, after: float) -> str:
    """Return "0.1494 -> 0.1395", or only the latter; "worse" follows if a loss rose or an accuracy fell by over 1%."""
    is_accuracy = key == "eval/accuracy"
    texts = [f"{x:.1%}" if is_accuracy else short(x) for x in (before, after) if x is not None]
    if before is not None and (before - after if is_accuracy else after - before) > 0.01 * abs(before):
        texts[-1] += "  worse"
    return " -> ".join(texts)


def loss_fields(state: RunState) -> list[str]:
    """Return loss, KL and its trend."""
    label, kl = kl_of(state.numbers)
    # The alarm compares with the first batch and the trend with the last steps: the two would seem to contradict.
    no_trend = state.trend is None or "kl_rises" in state.active_alarms
    trend = "" if no_trend or state.trend is None else f" {max(-9.99, min(9.99, state.trend)):+.0%}"
    loss = f"loss {short(state.numbers['loss/total'])}" if state.numbers.get("loss/tokens") != 0 else "no loss token"
    return [loss] if kl is None else [loss, f"{label} {short(kl)}{trend}"]


def speed_fields(m: Mapping[str, float]) -> list[str]:
    """Return duration, tokens/s, and the pool that the step waited for."""
    tokens_per_s = m["rollout/response_tokens"] / plain_s(m)
    fields = [seconds(m["time/step_s"]) + _without(m), f"{count(tokens_per_s)} tok/s"]
    bottleneck = bottleneck_of(m)
    return fields if bottleneck is None else [*fields, f"{bottleneck[0]} {bottleneck[1]:.0%}"]


def step_line(state: RunState, remark: str = "") -> str:
    """Return step, remaining time, alarms, and the numbers of the newest step.

    Fields at the end are left out if the line would be too long.

    Args:
        remark: a short warning; before the fields that may be left out.
    """
    alarms = state.active_alarms
    fields = [f"step {state.step}/{state.total_steps}", f"ETA {clock(state.left_s)}", *loss_fields(state)]
    if alarms:
        fields.append(f"ALARM {alarms[0][:20]}" + (f" +{len(alarms) - 1}" if len(alarms) > 1 else ""))
    if remark:
        fields.append(remark)
    fields += speed_fields(state.numbers)
    while len(line := "  ".join(fields)) > MAX_LINE - PREFIX:
        fields.pop()
    return line


def _without(m: Mapping[str, float]) -> str:
    """Return what an evaluation or a checkpoint took of the step, if it was much."""
    taken_s, name = max((m.get("time/eval_s", 0.0), "eval"), (m.get("time/checkpoint_s", 0.0), "save"))
    return f" ({name} {seconds(taken_s).removesuffix(' s')})" if taken_s > 0.2 * m["time/step_s"] else ""
