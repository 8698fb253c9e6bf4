"""Keep of each metric what the health checks read: its first and its last values."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from itertools import islice

import numpy as np

N_FIRST, N_RECENT = 5, 100  # values kept of each metric


class History:
    """The lines of metrics.jsonl so far, in bounded memory. Missing values and null are skipped."""

    def __init__(self) -> None:
        self._first: dict[str, list[float]] = {}
        self._recent: dict[str, deque[float]] = {}
        self._newest: Mapping[str, float | None] = {}
        self.begins_at: float | None = None  # step of the first line

    def add(self, line: Mapping[str, float | None]) -> None:
        """Add the numbers of one line."""
        self._newest = line
        if self.begins_at is None:
            self.begins_at = line["step"]
        for name, value in line.items():
            if value is None or not np.isfinite(value):
                continue
            first = self._first.setdefault(name, [])
            if len(first) < N_FIRST:
                first.append(value)
            self._recent.setdefault(name, deque(maxlen=N_RECENT)).append(value)

    def is_new(self, name: str) -> bool:
        """Return whether the newest line has a finite value of the metric."""
        value = self._newest.get(name)
        return value is not None and bool(np.isfinite(value))

    def any_new(self, *names: str) -> str | None:
        """Return the first of the metrics of which the newest line has a value."""
        return next((name for name in names if self.is_new(name)), None)

    def last(self, name: str, n: int) -> list[float] | None:
        """Return the last `n` values, at most `N_RECENT`; None: there are fewer, or the newest line has none."""
        values = self._recent.get(name, ())
        if not self.is_new(name) or len(values) < n:
            return None
        return list(islice(values, len(values) - n, None))

    def mean(self, name: str, n: int) -> float | None:
        """Return the mean of the last `n` values; None as for `last`."""
        values = self.last(name, n)
        return None if values is None else float(np.mean(values))

    def first(self, name: str, n: int = 1) -> list[float] | None:
        """Return the first `n` values, at most `N_FIRST`; None: there are fewer."""
        values = self._first.get(name, [])
        return values[:n] if len(values) >= n else None

    def means(self, name: str, n: int) -> np.ndarray:
        """Return the means of all runs of `n` values among the last `N_RECENT`, oldest first."""
        values = np.array(self._recent.get(name, ()), float)
        return np.lib.stride_tricks.sliding_window_view(values, n).mean(axis=1) if len(values) >= n else np.zeros(0)
