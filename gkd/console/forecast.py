"""Estimate the remaining time of a run from its recent steps. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

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
