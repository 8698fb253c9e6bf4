"""Format numbers for lines and tables of bounded width."""

from __future__ import annotations

import math


def short(value: float | None) -> str:
    """Return a value in at most 8 characters: 0.1478, 12.35, 1.2e-07; a dash for None."""
    if value is None:
        return "-"
    if value == 0:
        return "0"
    if not 1e-4 <= abs(value) < 1e5:
        return f"{value:.1e}"
    return f"{value:.{max(0, min(4, 3 - math.floor(math.log10(abs(value)))))}f}"


def count(value: float) -> str:
    """Return a count in at most 5 characters: 812, 3.5k, 120k, 1.3M."""
    for unit in ("", "k", "M", "G", "T"):
        if abs(value) < 999.5 or unit == "T":
            return f"{value:.1f}{unit}" if unit and abs(value) < 9.95 else f"{value:.0f}{unit}"
        value /= 1000
    raise AssertionError("unreachable")


def seconds(value: float) -> str:
    """Return a duration for reading: 0.93 s, 12.4 s, 3:05, 2:03:04."""
    if value >= 99.95:
        return clock(value)
    return f"{value:.2f} s" if value < 9.995 else f"{value:.1f} s"


def clock(value: float | None) -> str:
    """Return a duration as a clock shows it: 0:07, 3:05, 26:03:04; a dash for None."""
    if value is None:
        return "-"
    minutes, s = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{s:02}" if hours else f"{minutes}:{s:02}"
