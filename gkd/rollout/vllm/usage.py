"""Timing of one engine's forward passes; `gkd.tools.split` predicts other GPU splits from it.

A pass takes about pass_s + sequence_s * b + prefill_s * p seconds, where b sequences advance by one token each and p
prompt tokens are prefilled. The meter keeps the sums that a least-squares fit of the three coefficients needs, so its
size does not grow with the number of passes. No ray and no vLLM here.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

import numpy as np

from gkd.spans import Phase, SpanRecorder
from gkd.types import EngineUsage


class PassMeter:
    """Measures the passes of one engine, which starts waiting sequences first come, first served.

    One thread runs the passes. Any thread may call `pop_usage`, which does not wait for the current pass.

    Args:
        max_running: maximum number of sequences in a pass.
        spans: records the periods of successive passes as `generate`; on the same clock.
    """

    def __init__(
        self, max_running: int, spans: SpanRecorder | None = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._max_running, self._spans, self._clock = max_running, spans, clock
        self._waiting: deque[int] = deque()  # prompt tokens of each sequence that has not started
        self._n_running = 0
        self._lock = threading.Lock()  # guards the sums: products, lengths, gap
        self.n_passes = 0  # finished since the start
        self._n_recompute = 0  # tokens that the next pass prefills in addition to new prompts
        self._products, self._longest = np.zeros((4, 4)), 0
        self._gap_s = 0.0
        self._ended_s: float | None = None  # end of the last pass; None if the time until the next pass is not a gap

    def added(self, n_prompt_tokens: int) -> None:
        self._waiting.append(n_prompt_tokens)

    def finished(self, n_response_tokens: int) -> None:
        self._n_running -= 1
        with self._lock:
            self._longest = max(self._longest, n_response_tokens)

    def dropped(self, n_left: int) -> None:
        """Note that sequences were aborted; of the `n_left` others, the last added ones are still waiting."""
        self._n_running = min(self._n_running, n_left)
        while len(self._waiting) > n_left - self._n_running:
            self._waiting.pop()
        if not n_left:
            self._ended_s = None

    def paused(self, n_recompute: int) -> None:
        """Note an interruption after which the KV cache of `n_recompute` tokens must be recomputed."""
        self._n_recompute += n_recompute
        self._ended_s = None

    def time_pass(self, step: Callable[[], None]) -> None:
        """Run one pass and measure it."""
        n_prefill, self._n_recompute = self._n_recompute, 0
        while self._waiting and self._n_running < self._max_running:
            n_prefill += self._waiting.popleft()
            self._n_running += 1
        n_running, began_s = self._n_running, self._clock()
        gap_s = 0.0 if self._ended_s is None else began_s - self._ended_s
        step()
        self.n_passes += 1
        ended_s = self._clock()
        self._ended_s = ended_s if self._n_running or self._waiting else None
        if self._spans is not None:
            self._spans.extend(Phase.GENERATE, began_s, ended_s)
        x = np.array([1.0, n_running, n_prefill, ended_s - began_s])
        with self._lock:
            self._products += np.outer(x, x)
            self._gap_s += gap_s

    def pop_usage(self) -> EngineUsage:
        """Return and reset the sums since the last call."""
        with self._lock:
            products, self._products = self._products, np.zeros((4, 4))
            longest, self._longest = self._longest, 0
            gap_s, self._gap_s = self._gap_s, 0.0
        return EngineUsage(float(products[0, 3]), gap_s, products, longest)
