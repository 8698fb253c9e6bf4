"""What the engines did between two reads: `gkd.tools.split_tuner` predicts other splits of the GPUs from it.

A pass of an engine takes about pass_s + sequence_s * b + prefill_s * p seconds, where b sequences move by a token each
and p tokens of prompts are read. The engine keeps the sums that a least-squares fit of the three needs, so that nothing
grows with the number of passes. No ray and no vLLM here.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

import numpy as np

from gkd.handles import EngineUsage


class PassMeter:
    """Times the passes of one engine, which begins waiting sequences in the order in which they came.

    One thread makes the passes; any may call `taken`, which does not wait for the pass that is being made.

    Args:
        max_running: sequences that a pass moves at most.
    """

    def __init__(self, max_running: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self._max_running, self._clock = max_running, clock
        self._waiting: deque[int] = deque()  # prompt tokens of each sequence that no pass has moved
        self._n_running = 0
        self._lock = threading.Lock()  # guards the sums: products, lengths, gap
        self._unread = 0  # tokens that the next pass reads besides new prompts
        self._products, self._lengths = np.zeros((4, 4)), list[int]()
        self._gap_s = 0.0
        self._ended_s: float | None = None  # the last pass; None: what comes before the next one is no gap

    def added(self, n_prompt_tokens: int) -> None:
        self._waiting.append(n_prompt_tokens)

    def finished(self, n_response_tokens: int) -> None:
        self._n_running -= 1
        with self._lock:
            self._lengths.append(n_response_tokens)

    def dropped(self, n_left: int) -> None:
        """Sequences were taken away; so many are left, of which those that came last still wait."""
        self._n_running = min(self._n_running, n_left)
        while len(self._waiting) > n_left - self._n_running:
            self._waiting.pop()
        if not n_left:
            self._ended_s = None

    def paused(self, n_forgotten: int) -> None:
        """The engine was held; the cache of running sequences, so many tokens, must be computed anew."""
        self._unread += n_forgotten
        self._ended_s = None

    def time_pass(self, step: Callable[[], None]) -> None:
        """Make one pass."""
        n_read, self._unread = self._unread, 0
        while self._waiting and self._n_running < self._max_running:
            n_read += self._waiting.popleft()
            self._n_running += 1
        n_running, began_s = self._n_running, self._clock()
        gap_s = 0.0 if self._ended_s is None else began_s - self._ended_s
        step()
        ended_s = self._clock()
        self._ended_s = ended_s if self._n_running or self._waiting else None
        x = np.array([1.0, n_running, n_read, ended_s - began_s])
        with self._lock:
            self._products += np.outer(x, x)
            self._gap_s += gap_s

    def taken(self) -> EngineUsage:
        """All since the last call of this."""
        with self._lock:
            products, self._products = self._products, np.zeros((4, 4))
            lengths, self._lengths = self._lengths, list[int]()
            gap_s, self._gap_s = self._gap_s, 0.0
        return EngineUsage(float(products[0, 3]), gap_s, products, np.array(lengths, np.int32))
