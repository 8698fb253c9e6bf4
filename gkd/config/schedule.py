"""Values that change during a run, `trainer.schedules`: linear between points [step, value], constant outside."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeAlias

Points: TypeAlias = Sequence[Sequence[float]]

# Keys that may have a schedule; so may the weight of an entry of distill.losses, as distill.losses.NAME.
OF_ROLLOUTS = ("data.max_response_length", "rollout.max_turns", "rollout.temperature")
REWARD_WEIGHT = "distill.reward_weight"
LOSSES = "distill.losses."


def with_points(schedules: Any) -> Any:
    """Return points for each schedule written as {from: A, to: B, steps: N}, and other values as they are."""
    if not isinstance(schedules, Mapping):
        return schedules
    return {
        key: [[0, value["from"]], [value["steps"], value["to"]]]
        if isinstance(value, Mapping) and value.keys() == {"from", "to", "steps"}
        else value
        for key, value in schedules.items()
    }


def value_at(points: Points, step: int) -> float:
    """Return the value of a schedule while step `step` + 1 is made, counted from 0."""
    for (start, before), (end, after) in pairwise(points):
        if start <= step < end:
            return before + (after - before) * (step - start) / (end - start)
    return points[0][1] if step < points[0][0] else points[-1][1]


def points_problem(points: Points) -> str:
    """Return what is wrong with the points of a schedule; empty: nothing."""
    if not points or any(len(point) != 2 for point in points):
        return "is no list of [step, value]."
    steps = [step for step, _ in points]
    if any(step < 0 or step != int(step) for step in steps) or any(a >= b for a, b in pairwise(steps)):
        return "its steps do not increase from 0 on."
    return "" if all(math.isfinite(value) for _, value in points) else "a value is not finite."
