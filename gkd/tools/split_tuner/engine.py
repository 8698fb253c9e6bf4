"""Simulate one rollout engine: continuous batching, with one event per finished sequence.

Between two events (a sequence finishes or starts, the weights change) all passes are equal, so they take one
multiplication.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence

import numpy as np

from gkd.tools.split_tuner.rates import Rates

_ROUNDING = 1e-9  # share of a pass, for times that equal the end of a pass up to rounding


class Engine:
    """An engine with its own clock.

    Args:
        max_running: sequences in one pass. At the start of each pass waiting ones start in order, as many as fit.
        at_s: time of its creation.
    """

    def __init__(self, rates: Rates, max_running: int, at_s: float = 0.0) -> None:
        self._rates, self._max_running = rates, max_running
        self.at_s = at_s  # end of the last pass, or the last idle time
        self.busy_s = 0.0
        self.n_passes = 0
        self._unread_s = 0.0  # additional time of the next pass, for prompts and recomputed caches
        self._running: list[
            tuple[int, int, int, float]
        ] = []  # (last pass, owner, pass before the first, prompt tokens)
        self._waiting: deque[tuple[int, int, float]] = deque()  # (response tokens, owner, prompt tokens)

    @property
    def n_running(self) -> int:
        return len(self._running)

    @property
    def n_waiting(self) -> int:
        return len(self._waiting)

    def add(self, owner: int, lengths: Sequence[int], prompt_tokens: float) -> None:
        """Add sequences; they start at the next pass with room."""
        self._waiting.extend((length, owner, prompt_tokens) for length in lengths)

    def begin(self) -> list[int]:
        """Start waiting sequences while there is room, and return their owners; `at_s` must be the start of a pass."""
        begun = []
        while self._waiting and len(self._running) < self._max_running:
            length, owner, prompt_tokens = self._waiting.popleft()
            heapq.heappush(self._running, (self.n_passes + length, owner, self.n_passes, prompt_tokens))
            self._unread_s += self._rates.prefill_s * prompt_tokens
            begun.append(owner)
        return begun

    def next_finish_s(self) -> float:
        """Return when the first running sequence finishes; infinite if none runs."""
        if not self._running:
            return math.inf
        return self.at_s + self._unread_s + (self._running[0][0] - self.n_passes) * self._pass_s()

    def run_to_finish(self) -> list[int]:
        """Run until a sequence finishes and is handed over; return the owners of all that finish in that pass."""
        self._advance(self._running[0][0] - self.n_passes)
        finished = []
        while self._running and self._running[0][0] == self.n_passes:
            finished.append(heapq.heappop(self._running)[1])
        self.at_s += self._rates.hand_over_s * len(finished)
        return finished

    def run_to(self, time_s: float) -> None:
        """Run the passes that start before this time; no sequence may finish in a pass that ends before it."""
        if not self._running:
            self.at_s = max(self.at_s, time_s)
            return
        left_s = time_s - self.at_s - self._unread_s
        if time_s > self.at_s:
            self._advance(max(1, math.ceil(left_s / self._pass_s() - _ROUNDING)))

    def hold(self, until_s: float) -> None:
        """Pause until this time; the caches of all running sequences must be recomputed."""
        self.at_s = max(self.at_s, until_s)
        moved = [(self.n_passes - began, prompt) for _, _, began, prompt in self._running if self.n_passes > began]
        self._unread_s += self._rates.prefill_s * sum(written + prompt for written, prompt in moved)

    def _advance(self, n_passes: int) -> None:
        if n_passes:
            took_s = self._unread_s + n_passes * self._pass_s()
            self.at_s, self.busy_s, self._unread_s = self.at_s + took_s, self.busy_s + took_s, 0.0
            self.n_passes += n_passes

    def _pass_s(self) -> float:
        return self._rates.pass_s + self._rates.sequence_s * len(self._running)


def finish_times(lengths: np.ndarray, prompt_tokens: float, max_running: int, rates: Rates) -> np.ndarray:
    """Return [m] float64: when an engine finishes each of these sequences, all submitted at time 0."""
    m = len(lengths)
    finished = np.empty(m)
    if m <= max_running:  # all start at once: sorted by length, the passes have one sequence less after each
        order = np.argsort(lengths, kind="stable")
        in_order = lengths[order]
        n_running = m - np.searchsorted(in_order, in_order, side="left")
        more = np.diff(in_order, prepend=0)
        took = more * (rates.pass_s + rates.sequence_s * n_running)
        handed_over = np.searchsorted(in_order, in_order, side="right")
        finished[order] = np.cumsum(took) + rates.prefill_s * prompt_tokens * m + rates.hand_over_s * handed_over
        return finished
    engine = Engine(rates, max_running)
    for i, length in enumerate(lengths.tolist()):
        engine.add(i, [length], prompt_tokens)
    engine.begin()
    while engine.n_running:
        done = engine.run_to_finish()
        finished[done] = engine.at_s
        engine.begin()
    return finished
