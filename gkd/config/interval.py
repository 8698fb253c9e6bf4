"""Parse `trainer.save_every`: a number of steps, or a time."""

from __future__ import annotations

import re
from dataclasses import dataclass

from gkd.errors import ConfigError

_SECONDS = {"s": 1, "min": 60, "h": 3600}
_FIX = "give steps, e.g. 100 (0 = only at the end), or a time in s, min or h, e.g. 45s, 30min, 2h."


@dataclass(frozen=True, slots=True)
class Interval:
    """An interval in steps or in seconds; the other one is 0. Both 0: never."""

    steps: int = 0
    seconds: float = 0.0


def save_interval(value: int | str) -> Interval:
    """Return the interval that `trainer.save_every` names. Raises ConfigError: it names none."""
    text = str(value).strip()
    if re.fullmatch("[0-9]+", text):
        return Interval(steps=int(text))
    named = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?(s|min|h)", text)
    if named is None:
        raise ConfigError("trainer.save_every", value, "is neither a number of steps nor a time.", _FIX)
    if (seconds := float(named[1]) * _SECONDS[named[2]]) == 0.0:
        raise ConfigError("trainer.save_every", value, "is an empty time.", _FIX)
    return Interval(seconds=seconds)
