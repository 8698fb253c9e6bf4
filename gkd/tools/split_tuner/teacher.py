"""Simulate the teacher: sequences are scored in order of arrival, each by the next free worker."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from gkd.tools.split_tuner.rates import Rates


class Teacher:
    def __init__(self, rates: Rates, n_workers: int) -> None:
        self._rates = rates
        self._free_at = [0.0] * n_workers
        self.busy_s = 0.0  # of all workers together

    def score(self, submitted_s: float, tokens: Sequence[float]) -> float:
        """Return when the last of these sequences is scored. Call it in the order of time.

        Args:
            tokens: prompt and response tokens of each.
        """
        done_s = submitted_s
        for n_tokens in tokens:
            took_s = self._rates.score_s + self._rates.score_token_s * n_tokens
            free_s = max(submitted_s, self._free_at[0]) + took_s
            heapq.heapreplace(self._free_at, free_s)
            self.busy_s += took_s
            done_s = max(done_s, free_s)
        return done_s
