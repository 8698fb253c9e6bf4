"""The log line of a step: at most 110 characters with the logger's prefix."""

from __future__ import annotations

from collections.abc import Mapping
from operator import itemgetter

from gkd.console.numbers import clock, count, seconds, short
from gkd.console.state import RunState, bottleneck_of, kl_of, plain_s

MAX_LINE = 110
STEP_LINE = {"is_step_line": True}  # `extra` of its log record: a panel replaces it
PREFIX = len("12:34:56 [gkd.trainer] ")


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
    fields = [
        f"step {state.step}/{state.total_steps}",
        f"ETA {clock(state.left_s)}",
        f"loss {short(m['loss/total'])}",
        "" if kl is None else f"{label} {short(kl)}{_trend(state.trend)}",
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


def _trend(change: float | None) -> str:
    return "" if change is None else f" {max(-9.99, min(9.99, change)):+.0%}"


def _without(m: Mapping[str, float]) -> str:
    """Return what an evaluation or a checkpoint took of the step, if it was much."""
    name, taken_s = max(
        (("eval", m.get("time/eval_s", 0.0)), ("save", m.get("time/checkpoint_s", 0.0))), key=itemgetter(1)
    )
    return f" ({name} {seconds(taken_s).removesuffix(' s')})" if taken_s > 0.2 * m["time/step_s"] else ""
