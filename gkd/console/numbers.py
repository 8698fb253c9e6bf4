"""Format numbers for lines and tables of bounded width."""

from __future__ import annotations

import math


def short(value: float | None) -> str:
    """Return a value in at most 8 characters: 0.1478, 12.35, 1.2e-07; a dash for None."""
    if value is None:
        return "-"
    if not math.isfinite(value):
        return str(value)
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 1e5 or size < 1e-4:
        return f"{value:.1e}"
    return f"{value:.{max(0, min(4, 3 - math.floor(math.log10(size))))}f}"


def count(value: float) -> str:
    """Return a count in at most 5 characters: 812, 3.5k, 120k, 1.3M."""
    if not math.isfinite(value):
        return "-"
    for unit in ("", "k", "M", "G", "T"):
        if abs(value) < 999.5 or unit == "T":
            return f"{value:.1f}{unit}" if unit and abs(value) < 9.95 else f"{value:.0f}{unit}"
        value /= 1000
    raise AssertionError("unreachable")


def seconds(value: float | None) -> str:
    """Return a duration for reading: 0.93 s, 12.4 s, 3:05, 2:03:04, 9d 4h; a dash for None."""
    if value is None or not math.isfinite(value):
        return "-"
    if value < 9.995:
        return f"{value:.2f} s"
    if value < 99.95:
        return f"{value:.1f} s"
    return clock(value)


def clock(value: float | None) -> str:
    """Return a duration as a clock shows it, in at most 7 characters: 0:07, 3:05, 2:03:04, 9d4h; a dash for None."""
    if value is None or not math.isfinite(value):
        return "-"
    minutes, s = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 100:
        return f"{hours // 24}d{hours % 24}h" if hours < 240000 else f"{hours // 24}d"
    return f"{hours}:{minutes:02}:{s:02}" if hours else f"{minutes}:{s:02}"
