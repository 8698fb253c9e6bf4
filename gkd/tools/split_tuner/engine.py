"""One rollout engine in the simulation: continuous batching, pass by pass, but counted in finished sequences.

Between two events (a sequence finishes, one begins, the weights change) all passes are alike, so a whole run of them is
one multiplication.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence

import numpy as np

from gkd.tools.split_tuner.rates import Rates

_ROUNDING = 1e-9  # of a pass: a time that is a pass's end but for rounding is that pass's end


class Engine:
    """Sequences in, finished ones out, in the engine's own time.

    Args:
        max_running: sequences in one pass. As many as fit of those that wait begin at each pass's start, in order.
        at_s: when it is made.
    """

    def __init__(self, rates: Rates, max_running: int, at_s: float = 0.0) -> None:
        self._rates, self._max_running = rates, max_running
        self.at_s = at_s  # the end of the last whole pass, or when it was last idle
        self.busy_s = 0.0
        self.n_passes = 0
        self._unread_s = 0.0  # what the next pass takes longer, for prompts and forgotten caches
        self._running: list[tuple[int, int, int, float]] = []  # (pass that ends it, whose, pass before it, prompt)
        self._waiting: deque[tuple[int, int, float]] = deque()  # (response tokens, whose, prompt tokens)

    @property
    def n_running(self) -> int:
        return len(self._running)

    @property
    def n_waiting(self) -> int:
        return len(self._waiting)

    def add(self, owner: int, lengths: Sequence[int], prompt_tokens: float) -> None:
        """Sequences that begin at the next pass that has room for them."""
        self._waiting.extend((length, owner, prompt_tokens) for length in lengths)

    def begin(self) -> list[int]:
        """Begin what waits, as far as there is room; `at_s` must be where the next pass begins. Whose they are."""
        begun = []
        while self._waiting and len(self._running) < self._max_running:
            length, owner, prompt_tokens = self._waiting.popleft()
            heapq.heappush(self._running, (self.n_passes + length, owner, self.n_passes, prompt_tokens))
            self._unread_s += self._rates.prefill_s * prompt_tokens
            begun.append(owner)
        return begun

    def next_finish_s(self) -> float:
        """When the first running sequence is finished; infinite if none runs."""
        if not self._running:
            return math.inf
        return self.at_s + self._unread_s + (self._running[0][0] - self.n_passes) * self._pass_s()

    def run_to_finish(self) -> list[int]:
        """Make passes until a sequence is finished; whose those are that finish in that pass."""
        self._advance(self._running[0][0] - self.n_passes)
        finished = []
        while self._running and self._running[0][0] == self.n_passes:
            finished.append(heapq.heappop(self._running)[1])
        return finished

    def run_to(self, time_s: float) -> None:
        """Make the passes that begin before this time; no sequence may be finished by one that ends before it."""
        if not self._running:
            self.at_s = max(self.at_s, time_s)
            return
        left_s = time_s - self.at_s - self._unread_s
        if time_s > self.at_s:
            self._advance(max(1, math.ceil(left_s / self._pass_s() - _ROUNDING)))

    def hold(self, until_s: float) -> None:
        """Nothing moves until then, and the cache of all that runs must be computed anew."""
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
    """[m] float64: when an engine that is given these at time 0, and nothing else, has finished each of them."""
    m = len(lengths)
    finished = np.empty(m)
    if m <= max_running:  # all begin at once: sorted by length, each one's passes have one sequence less
        order = np.argsort(lengths, kind="stable")
        in_order = lengths[order]
        n_running = m - np.searchsorted(in_order, in_order, side="left")
        more = np.diff(in_order, prepend=0)
        took = more * (rates.pass_s + rates.sequence_s * n_running)
        finished[order] = np.cumsum(took) + rates.prefill_s * prompt_tokens * m
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
